"""How much of the machine anybody but an engine and this process uses, from the kernel's own accounts.

Owns: reading `/proc/stat`. Never does: decide what is too much (`session`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["OtherLoad"]

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_NOT_BUSY: Final = (3, 4)  # idle and iowait, of the numbers after "cpu" (proc(5)); time stolen by the host counts


class OtherLoad:
    """CPU time of others since it was made. `own_s` says what the engine has used, in seconds, and may only grow."""

    def __init__(self, own_s: Callable[[], float]) -> None:
        self._own_s = own_s
        self._began_s, self._others_began_s = time.monotonic(), self._others_s()

    def cores(self) -> float:
        """Mean number of cores that others kept busy."""
        seconds = time.monotonic() - self._began_s
        return max(self._others_s() - self._others_began_s, 0.0) / seconds if seconds > 0 else 0.0

    def _others_s(self) -> float:
        return _busy_s() - self._own_s() - time.process_time()


def _busy_s() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(int(ticks) for at, ticks in enumerate(fields) if at not in _NOT_BUSY) / _TICKS_PER_S
