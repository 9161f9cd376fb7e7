"""The directory of one group: its lock, its description, its end.

Owns: the files in it (`lock`, `group.json`). Never does: create a socket.

The supervisor holds a flock on `lock` for its whole life, so whoever can take that lock knows that the group is gone:
the kernel drops it with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from procengine.errors import ConfigError
from procengine.paths import running_group_dirs

__all__ = ["claim_run_dir", "remove_run_dir", "sweep_stale_dirs", "write_description"]


def claim_run_dir(path: Path) -> int:
    """Make the directory and lock it. Returns the lock's descriptor, to be kept open.

    Raises:
        ConfigError: a running group has that name.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ConfigError(f"name: a group named {path.name!r} is running already; stop it or choose another") from error
    for leftover in path.iterdir():
        if leftover.name != "lock":
            leftover.unlink()
    return lock


def sweep_stale_dirs(root: Path) -> None:
    """Remove the directories of groups whose supervisor is gone."""
    for path in running_group_dirs(root):
        with contextlib.suppress(OSError):  # another supervisor may sweep at the same time
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            except BlockingIOError:
                pass
            finally:
                os.close(lock)


def write_description(path: Path, description: dict[str, Any]) -> None:
    """Publish `group.json`; a reader sees it whole or not at all."""
    draft = path / "group.json.new"
    draft.write_text(json.dumps(description))
    draft.rename(path / "group.json")


def remove_run_dir(path: Path) -> None:
    """The end of a group, while its lock is still held."""
    shutil.rmtree(path, ignore_errors=True)
