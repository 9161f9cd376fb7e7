"""The directory of one group: its lock, its description, its end.

Owns: the files in it (`lock`, `group.json`). Never does: create a socket.

The supervisor holds a flock on `lock` for its whole life, so whoever can take that lock knows that the group is gone:
the kernel drops it with the process, however that ends. Directories come and go under a lock of their parent's, so that
a sweep never takes one that another supervisor is just about to claim.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from procengine.errors import ConfigError
from procengine.paths import running_group_dirs

_LOCK_TRIES = 20
_LOCK_PAUSE_S = 0.005

__all__ = ["claim_run_dir", "remove_run_dir", "sweep_stale_dirs", "write_description"]


def claim_run_dir(path: Path) -> int:
    """Make the directory and lock it. Returns the lock's descriptor, to be kept open.

    Raises:
        ConfigError: a running group has that name, or there is no place for it.
    """
    try:
        return _claim(path)
    except OSError as error:
        raise ConfigError(f"run directory {path} cannot be used: {error.strerror}") from error


def _claim(path: Path) -> int:
    with _locked_root(path.parent):
        path.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock(lock):
            os.close(lock)
            raise ConfigError(f"name: a group named {path.name!r} is running already; stop it or choose another")
        for leftover in path.iterdir():
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            elif leftover.name != "lock":
                leftover.unlink()
    return lock


def _lock(lock: int) -> bool:
    """Take the lock, unless a supervisor has it. Clients that ask whether a group lives hold it for microseconds."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
    return False


def sweep_stale_dirs(root: Path) -> None:
    """Remove the directories of groups whose supervisor is gone."""
    if not root.is_dir():
        return
    with _locked_root(root):
        for path in running_group_dirs(root):
            with contextlib.suppress(OSError):  # what cannot be removed may stay
                _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def write_description(path: Path, description: dict[str, Any]) -> None:
    """Publish `group.json`; a reader sees it whole or not at all.

    Raises:
        ConfigError: it cannot be written; the one that was there stays.
    """
    draft = path / "group.json.new"
    try:
        draft.write_text(json.dumps(description))
        draft.rename(path / "group.json")
    except OSError as error:
        raise ConfigError(f"{path / 'group.json'} cannot be written: {error.strerror}") from error


def remove_run_dir(path: Path) -> None:
    """The end of a group, while its lock is still held."""
    with contextlib.suppress(OSError), _locked_root(path.parent):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked_root(root: Path) -> Iterator[None]:
    """Waits for its turn; whoever has it needs some milliseconds."""
    lock = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
