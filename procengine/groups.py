"""Finds the process groups that run on this machine, by what their supervisors leave in the run directories.

Owns: reading `lock` and `group.json`. Never does: write there, or talk to a group.
A live supervisor holds the flock on `lock`; the kernel lets go of it when the supervisor ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from procengine.errors import GroupNotFoundError
from procengine.paths import run_root, running_group_dirs, socket_path

__all__ = ["GroupInfo", "describe", "find_group", "is_alive", "is_gone", "running_groups"]


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A group that is ready. `run_dir` is "" for an endpoint that is not in this machine's run directories."""

    name: str
    endpoint: str
    control: str = ""
    model: str = ""
    pids: dict[str, int] = {}
    run_dir: str = ""
    num_blocks: int = 0  # KV blocks of all workers together
    metrics: str = ""  # URL of the metrics, if they are served
    http: str = ""  # URL of the HTTP front door, if there is one; unix:PATH for a Unix socket
    is_private: bool = False  # launched by a program for itself: found by name, never as "the only running group"


def is_alive(run_dir: str | Path) -> bool:
    """Whether the supervisor of this run directory lives: its lock cannot be taken.

    The lock is asked for in shared mode, so that two callers at once do not take each other for a supervisor.
    """
    try:
        descriptor = os.open(Path(run_dir) / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_gone(group: GroupInfo) -> bool:
    """Whether a group is known to have ended. Of one that runs elsewhere nothing is known.

    Another one may have taken its name and directory since (a service manager restarts what was killed): it is known by
    its supervisor, which removes the old description before it writes its own.
    """
    if not group.run_dir:
        return False
    if not is_alive(group.run_dir):
        return True
    described = describe(Path(group.run_dir))
    supervisor = group.pids.get("supervisor")  # its children may have been restarted
    return supervisor is not None and (described is None or described.pids.get("supervisor") != supervisor)


def running_groups(root: Path | None = None) -> list[GroupInfo]:
    """Groups below `root` (default: `paths.run_root()`) that are ready and alive, in name order."""
    directories = running_group_dirs(root or run_root())
    return [info for directory in directories if (info := describe(directory)) is not None and is_alive(directory)]


def find_group(endpoint_or_name: str | None = None, root: Path | None = None) -> GroupInfo:
    """The running group with this name or endpoint; None is the only running one.

    Raises:
        GroupNotFoundError: there is none, or several and none was named.
    """
    if endpoint_or_name is not None and "://" in endpoint_or_name:
        return _by_endpoint(endpoint_or_name)
    root = root or run_root()
    groups = running_groups(root)
    if endpoint_or_name is not None:
        return _by_name(endpoint_or_name, groups, root)
    groups = [group for group in groups if not group.is_private]
    if len(groups) == 1:
        return groups[0]
    if groups:
        raise GroupNotFoundError(f"{len(groups)} groups are running, name one of them: {_names(groups)}")
    raise GroupNotFoundError("no group is running; start one with `procengine serve MODEL`")


def _by_name(name: str, groups: list[GroupInfo], root: Path) -> GroupInfo:
    for group in groups:
        if group.name == name:
            return group
    if is_alive(root / name):
        raise GroupNotFoundError(f"group {name!r} is still starting")
    raise GroupNotFoundError(f"no group {name!r} is running; running: {_names(groups)}")


def _by_endpoint(endpoint: str) -> GroupInfo:
    """The group behind an endpoint. One that is no file here is taken at its word: there is nothing to look up."""
    if not endpoint.startswith("ipc://"):
        return GroupInfo(name=endpoint, endpoint=endpoint)
    directory = Path(endpoint.removeprefix("ipc://")).parent
    if not is_alive(directory):
        raise GroupNotFoundError(f"no group is running at {endpoint}")
    known = describe(directory)
    if known is not None and known.endpoint == endpoint:
        return known
    return GroupInfo(
        name=directory.name, endpoint=endpoint, control=socket_path(directory, "control"), run_dir=str(directory)
    )


def describe(directory: Path) -> GroupInfo | None:
    """What the supervisor wrote when it became ready; None before, or while another one cleans up."""
    try:
        info = msgspec.json.decode((directory / "group.json").read_bytes(), type=GroupInfo)
    except (OSError, msgspec.DecodeError):
        return None
    return msgspec.structs.replace(info, run_dir=str(directory))


def _names(groups: list[GroupInfo]) -> str:
    return ", ".join(group.name for group in groups) or "none"
