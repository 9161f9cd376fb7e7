"""`RecentFrames`: frames of a group for whoever asks, and nothing while nobody does.

Owns: a reader and a window of its own, from the first question on, and the newest frame while it is new. Never does:
count what has been since the group's start (`GroupTotals`), or wait.
"""

from __future__ import annotations

import time
from typing import Final

from procengine.groups import GroupInfo
from procengine.profiling.group_frame import Frame, make_frame
from procengine.profiling.group_totals import GroupTotals
from procengine.profiling.snapshot import SpanReader
from procengine.profiling.window import Window

__all__ = ["RecentFrames"]

_WINDOW_S: Final = 5.0
_NEW_NS: Final = 250_000_000  # many pages may look at once: they are shown the same


class RecentFrames:
    """Looks at one group. Not for several threads at once."""

    def __init__(self, supervisor_pid: int) -> None:
        self._reader = SpanReader(supervisor_pid)
        self._window = Window(_WINDOW_S)
        self._frame: Frame | None = None
        self._made_ns = 0

    def frame(self, info: GroupInfo, totals: GroupTotals) -> Frame:
        """The group now, or a moment ago."""
        now_ns = time.monotonic_ns()
        if self._frame is None or now_ns - self._made_ns > _NEW_NS:
            self._window.add(self._reader.read(), now_ns)
            self._frame, self._made_ns = make_frame(info, totals, self._window, now_ns), now_ns
        return self._frame
