"""How much memory new programs can have.

Owns: reading /proc/meminfo, and the limits of control groups (version 2: containers, services). Never does: decide how
much of it to take.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["available_bytes"]

_ROOT: Final = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """What can be had without swapping (proc(5), MemAvailable), and without going over a limit of a control group.

    A machine that has read many files has little that is free, and much that is available: most of the page cache.

    Args:
        root: where `proc` and `sys` are.
    """
    return min([_of_the_machine(root), *_of_control_groups(root)])


def _of_the_machine(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_control_groups(root: Path) -> Iterator[int]:
    """What is left in ours and in each around it; a limit that cannot be read is none (cgroups(7))."""
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
        if path is not None:
            top = root / "sys/fs/cgroup"
            folder = top / path
            for each in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
                yield from _left_in(each)


def _left_in(folder: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            used = int((folder / "memory.current").read_text())
            yield max(int(limit) - used + _reclaimable(folder), 0)


def _reclaimable(folder: Path) -> int:
    """Pages of files that nobody has used lately: they count as used, and go when others need the room."""
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0
