"""Fixtures of the tests over HTTP: groups of the mock device with a front door, on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from procengine.engine_args import EngineArgs
from procengine.launch import launch_group
from procengine.resolve import resolve
from tests.api.http_client import HttpClient
from tests.e2e.smollm2 import SMOLLM2_OPTIONS
from tests.procs.canary import Canary
from tests.procs.conftest import _own_places, model, serve, serve_module, short_dir
from tests.procs.harness import Served

__all__ = ["_own_places", "model", "serve", "serve_module", "short_dir"]


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    """A group that the tests of a module share."""
    return serve_module("--port", 0)


@pytest.fixture
def http(group: Served) -> HttpClient:
    """A client of it."""
    return HttpClient(group.ready["http"])


@pytest.fixture
def canary(group: Served) -> Canary:
    """How the group was before the test; `check` says whether it is as good as before."""
    return Canary.of(group, 2000)


@pytest.fixture(scope="session")
def smollm2_http(smollm2_gguf: Path, short_dir: Path) -> Iterator[HttpClient]:
    """A client of the real model, whose start costs seconds."""
    options: dict[str, Any] = {**SMOLLM2_OPTIONS, "port": 0, "tool_call_parser": "hermes"}
    with launch_group(resolve(EngineArgs(model=str(smollm2_gguf), **options))) as group:
        yield HttpClient(group.ready["http"])
