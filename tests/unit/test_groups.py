"""Discovery of running groups: directories with a held lock and a description."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from procengine.errors import GroupNotFoundError
from procengine.groups import GroupInfo, find_group, is_alive, is_gone, running_groups

Start = Callable[..., Path]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Makes what a supervisor leaves in its run directory. The lock is held until the test ends, unless `dead`."""
    with ExitStack() as held:

        def make(name: str, *, dead: bool = False, starting: bool = False) -> Path:
            directory = tmp_path / name
            directory.mkdir()
            lock = held.enter_context((directory / "lock").open("w"))
            if not dead:
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not starting:
                (directory / "group.json").write_text(json.dumps(description(directory)))
            return directory

        yield make


def description(directory: Path) -> dict[str, object]:
    return {
        "name": directory.name,
        "endpoint": f"ipc://{directory}/frontend.sock",
        "control": f"ipc://{directory}/control.sock",
        "model": "m",
        "pids": {"supervisor": 1},
        "num_blocks": 7,  # more than a client needs to know
    }


def test_running_groups_are_those_that_are_ready_and_alive(start: Start, tmp_path: Path) -> None:
    start("b"), start("a"), start("dead", dead=True), start("starting", starting=True)
    assert [group.name for group in running_groups(tmp_path)] == ["a", "b"]


def test_description_is_read(start: Start, tmp_path: Path) -> None:
    directory = start("a")
    assert running_groups(tmp_path) == [
        GroupInfo(
            name="a",
            endpoint=f"ipc://{directory}/frontend.sock",
            control=f"ipc://{directory}/control.sock",
            model="m",
            pids={"supervisor": 1},
            run_dir=str(directory),
            num_blocks=7,
        )
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": 3}'])
def test_group_with_an_unreadable_description_is_left_out(start: Start, tmp_path: Path, text: str) -> None:
    (start("a") / "group.json").write_text(text)
    assert running_groups(tmp_path) == []


def test_liveness_follows_the_lock(start: Start, tmp_path: Path) -> None:
    assert is_alive(start("alive"))
    assert not is_alive(start("dead", dead=True))
    assert not is_alive(tmp_path / "never")


def test_looking_at_a_lock_does_not_take_it(start: Start) -> None:
    directory = start("dead", dead=True)
    with (directory / "lock").open() as other_client:
        fcntl.flock(other_client, fcntl.LOCK_SH)
        assert not is_alive(directory)  # two that look at once are not a supervisor
    with (directory / "lock").open() as supervisor:
        fcntl.flock(supervisor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_only_group_is_found_without_a_name(start: Start, tmp_path: Path) -> None:
    start("a")
    assert find_group(None, tmp_path).name == "a"


def test_group_is_found_by_name_and_by_endpoint(start: Start, tmp_path: Path) -> None:
    start("a")
    directory = start("b")
    assert find_group("b", tmp_path).name == "b"
    assert find_group(f"ipc://{directory}/frontend.sock", tmp_path).pids == {"supervisor": 1}


def test_endpoint_of_a_group_that_is_not_described_is_taken_at_its_word(start: Start, tmp_path: Path) -> None:
    endpoint = f"ipc://{start('a', starting=True)}/frontend.sock"
    assert find_group(endpoint).endpoint == endpoint
    remote = find_group("tcp://elsewhere:1")
    assert (remote.endpoint, is_gone(remote)) == ("tcp://elsewhere:1", False)


def test_errors_name_the_running_groups(start: Start, tmp_path: Path) -> None:
    with pytest.raises(GroupNotFoundError, match="no group is running"):
        find_group(None, tmp_path)
    start("a"), start("b"), start("c", starting=True)
    with pytest.raises(GroupNotFoundError, match="2 groups are running, name one of them: a, b"):
        find_group(None, tmp_path)
    with pytest.raises(GroupNotFoundError, match="no group 'x' is running; running: a, b"):
        find_group("x", tmp_path)
    with pytest.raises(GroupNotFoundError, match="'c' is still starting"):
        find_group("c", tmp_path)
    with pytest.raises(GroupNotFoundError, match="no group is running at ipc://"):
        find_group(f"ipc://{tmp_path}/never/frontend.sock")


def test_group_is_gone_when_its_lock_is_free(start: Start) -> None:
    directory = start("dead", dead=True)
    assert is_gone(GroupInfo(name="dead", endpoint="ipc://x", run_dir=str(directory)))
