"""Fixtures of the tests on running groups. All groups live in run directories of their own, not in the user's."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.procs.canary import Canary
from tests.procs.harness import Served, make_model
from tests.procs.raw_client import RawClient


@pytest.fixture(scope="session")
def short_dir() -> Iterator[Path]:
    """A directory whose name is short enough for sockets in it; pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="pe-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session", autouse=True)
def _own_places(short_dir: Path, procengine_home: Path) -> Iterator[None]:
    """Groups, models and sockets of these tests are found nowhere else, and find nobody else's. But for the real model:
    the user's own home is known before it is hidden, so that none is fetched again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROCENGINE_RUN_DIR", str(short_dir / "run"))
        patch.setenv("PROCENGINE_HOME", str(short_dir / "home"))
        yield


@pytest.fixture(scope="session")
def model(short_dir: Path) -> Path:
    """The model of almost all groups here."""
    return make_model(short_dir / "tiny")


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts a group and waits until it is ready; it ends with the test."""
    with ExitStack() as groups:

        def start(
            *options: object,
            name: str = "g",
            waits: bool = True,
            env: dict[str, str] | None = None,
            max_files: int | None = None,
        ) -> Served:
            group = groups.enter_context(Served(model, tmp_path, *options, name=name, env=env, max_files=max_files))
            return group.wait_ready() if waits else group

        yield start


@pytest.fixture(scope="module")
def serve_module(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """The same for fixtures that share a group among the tests of a module."""
    folder = tmp_path_factory.mktemp("groups")
    with ExitStack() as groups:

        def start(*options: object, name: str = "shared") -> Served:
            return groups.enter_context(Served(model, folder, *options, name=name)).wait_ready()

        yield start


@pytest.fixture
def raw(group: Served) -> Iterator[RawClient]:
    """A client of bare sockets, of the module's `group`."""
    assert group.process.poll() is None, f"the group has ended:\n{group.log}"
    with RawClient(group.endpoint) as client:
        yield client


@pytest.fixture
def canary_after(remembered: Canary) -> Iterator[None]:
    """The test ends with the module's `remembered` canary: the group is as good as before, nothing is held or lost."""
    before = remembered.with_log()
    yield
    before.check()
