"""One group a directory, and nothing of the dead is left."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from procengine.errors import ConfigError
from procengine.run_dir import claim_run_dir, remove_run_dir, sweep_stale_dirs, write_description


@pytest.fixture
def locks() -> Iterator[list[int]]:
    """Descriptors to close at the end, as a process's end does."""
    held: list[int] = []
    yield held
    for lock in held:
        os.close(lock)


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_claim_makes_a_private_directory(tmp_path: Path, locks: list[int]) -> None:
    locks.append(claim_run_dir(tmp_path / "group"))
    assert (tmp_path / "group").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "group" / "lock").stat().st_mode & 0o777 == 0o600


def test_second_claim_is_refused_by_name_and_disturbs_nothing(tmp_path: Path, locks: list[int]) -> None:
    path = tmp_path / "group"
    locks.append(claim_run_dir(path))
    write_description(path, {"pid": 5})
    with pytest.raises(ConfigError, match="name: a group named 'group' is running already"):
        claim_run_dir(path)
    assert json.loads((path / "group.json").read_text()) == {"pid": 5}


def test_refused_claims_leak_no_descriptor(tmp_path: Path, locks: list[int]) -> None:
    locks.append(claim_run_dir(tmp_path / "group"))
    before = num_descriptors()
    for _ in range(5):
        with pytest.raises(ConfigError):
            claim_run_dir(tmp_path / "group")
    assert num_descriptors() == before


def test_claim_after_a_death_starts_from_an_empty_directory(tmp_path: Path, locks: list[int]) -> None:
    path = tmp_path / "group"
    lock = claim_run_dir(path)
    write_description(path, {})
    (path / "frontend.sock").touch()
    (path / "somebody's" / "folder").mkdir(parents=True)
    (path / "link").symlink_to(tmp_path)
    os.close(lock)
    locks.append(claim_run_dir(path))
    assert [entry.name for entry in path.iterdir()] == ["lock"]


def test_place_that_is_taken_by_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "group").touch()
    with pytest.raises(ConfigError, match=r"run directory .*group cannot be used: File exists"):
        claim_run_dir(tmp_path / "group")
    with pytest.raises(ConfigError, match=r"group\.json cannot be written: Not a directory"):
        write_description(tmp_path / "group", {})


def test_lock_is_not_inherited(tmp_path: Path, locks: list[int]) -> None:
    locks.append(claim_run_dir(tmp_path / "group"))
    assert not os.get_inheritable(locks[0])


def test_sweep_takes_the_dead_and_leaves_the_living_and_what_is_no_group(tmp_path: Path, locks: list[int]) -> None:
    locks.append(claim_run_dir(tmp_path / "living"))
    os.close(claim_run_dir(tmp_path / "dead"))
    (tmp_path / "dead" / "control.sock").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    sweep_stale_dirs(tmp_path)
    left = {entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(".")}
    assert left == {"living", "other", "file"}


def test_sweep_of_a_missing_root_is_nothing(tmp_path: Path) -> None:
    sweep_stale_dirs(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_sweep_leaks_no_descriptor(tmp_path: Path, locks: list[int]) -> None:
    locks.append(claim_run_dir(tmp_path / "living"))
    before = num_descriptors()
    for _ in range(5):
        os.close(claim_run_dir(tmp_path / "dead"))
        sweep_stale_dirs(tmp_path)
    assert num_descriptors() == before


def test_remove_takes_everything(tmp_path: Path, locks: list[int]) -> None:
    locks.append(claim_run_dir(tmp_path / "group"))
    remove_run_dir(tmp_path / "group")
    remove_run_dir(tmp_path / "group")
    assert not (tmp_path / "group").exists()


def test_remove_is_quiet_when_the_whole_root_is_gone(tmp_path: Path) -> None:
    remove_run_dir(tmp_path / "gone" / "group")
    assert not (tmp_path / "gone").exists()


def test_description_replaces_the_old_one_whole(tmp_path: Path) -> None:
    write_description(tmp_path, {"name": "a", "long": "x" * 5000})
    write_description(tmp_path, {"name": "b"})
    assert json.loads((tmp_path / "group.json").read_text()) == {"name": "b"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["group.json"]


def test_groups_that_start_while_others_sweep_get_their_directories(tmp_path: Path) -> None:
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            sweep_stale_dirs(tmp_path)

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for sweeper in sweepers:
        sweeper.start()
    try:
        for count in range(300):
            path = tmp_path / f"group-{count % 3}"
            lock = claim_run_dir(path)
            write_description(path, {"count": count})
            assert json.loads((path / "group.json").read_text()) == {"count": count}
            if count % 2:
                remove_run_dir(path)
            os.close(lock)
    finally:
        stop.set()
        for sweeper in sweepers:
            sweeper.join()
