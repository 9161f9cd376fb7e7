"""`CompletionRate`: how fast requests end, and when it is worth asking again. Pure.

Owns: an average over the last seconds. Never does: read a clock: the caller brings nanoseconds.
"""

from __future__ import annotations

from math import exp

__all__ = ["CompletionRate"]

_MEMORY_S = 10.0  # what ended longer ago counts for less than a third
_LEAST_S, _MOST_S, _UNKNOWN_S = 0.1, 60.0, 1.0


class CompletionRate:
    """A decaying count: `add` as requests end, `seconds_for` a number of them to end."""

    def __init__(self, now_ns: int) -> None:
        self._began_ns = self._counted_ns = now_ns
        self._count = 0.0

    def add(self, count: int, now_ns: int) -> None:
        """So many requests have ended."""
        self._decay(now_ns)
        self._count += count

    def per_second(self, now_ns: int) -> float:
        """Requests a second of late; 0 if none has ended."""
        self._decay(now_ns)
        seconds = _MEMORY_S * (1.0 - exp(-max(now_ns - self._began_ns, 1) / 1e9 / _MEMORY_S))
        return self._count / seconds

    def seconds_for(self, count: float, now_ns: int) -> float:
        """When so many will have ended, if it goes on as of late: 0.1 to 60 s, and 1 s where nothing is known."""
        if not self._count:
            return _UNKNOWN_S
        return min(max(count / max(self.per_second(now_ns), 1e-9), _LEAST_S), _MOST_S)

    def _decay(self, now_ns: int) -> None:
        self._count *= exp((self._counted_ns - now_ns) / 1e9 / _MEMORY_S)
        self._counted_ns = now_ns
