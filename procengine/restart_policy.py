"""`RestartPolicy`: how often, and how soon, a child that dies is started again. Pure: the caller brings the time.

Owns: the memory of recent deaths. Never does: start or stop anything.
"""

from __future__ import annotations

from collections import deque

__all__ = ["RestartPolicy"]

_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 8.0


class RestartPolicy:
    """At most `max_restarts` within `window_s` seconds: one more death, and the fault is not one that a restart mends.

    The first restart is immediate; each further one within the window waits twice as long as the one before, so that a
    child that dies at once does not keep a core busy.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._deaths: deque[float] = deque()

    @property
    def num_recent(self) -> int:
        """Deaths within the window, as of the last one."""
        return len(self._deaths)

    def delay_s(self, now_s: float) -> float | None:
        """A child died: seconds to wait before it is started again, or None: give up."""
        self._deaths.append(now_s)
        while self._deaths[0] < now_s - self.window_s:
            self._deaths.popleft()
        if len(self._deaths) > self.max_restarts:
            return None
        num_earlier = len(self._deaths) - 1
        return min(_FIRST_DELAY_S * 2 ** (num_earlier - 1), _MAX_DELAY_S) if num_earlier else 0.0
