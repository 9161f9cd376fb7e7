"""How much memory new programs can have.

Owns: reading /proc/meminfo. Never does: decide how much of it to take.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["available_bytes"]

_MEMINFO: Final = Path("/proc/meminfo")


def available_bytes(meminfo: Path = _MEMINFO) -> int:
    """What can be had without swapping (proc(5), MemAvailable): what is free, and most of the page cache.

    A machine that has read many files has little that is free, and much that is available.
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
