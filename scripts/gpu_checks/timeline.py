"""What a device did and when, from a trace of it: busy time, idle time, copies. Pure.

Owns: that arithmetic. Never does: record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Interval", "Timeline", "timeline"]


class Interval(NamedTuple):
    """One kernel or copy, in microseconds."""

    begin: float
    end: float
    name: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Of a number of passes; microseconds a pass.

    Attributes:
        idle: while nothing ran, of the time from the first to the last thing that ran.
        longest_gap: the median over passes of the longest idle time in one: what lies between two steps.
        h2d, d2h: of copies to and from the device.
    """

    num_passes: int
    whole: float
    busy: float
    idle: float
    longest_gap: float
    h2d: float
    d2h: float

    @property
    def idle_share(self) -> float:
        """0 to 1."""
        return self.idle / self.whole if self.whole else 0.0


def timeline(intervals: Iterable[Interval], num_passes: int) -> Timeline:
    """The figures of `num_passes` passes of equal work."""
    ordered = sorted(intervals)
    gaps, busy, end = [], 0.0, ordered[0].begin if ordered else 0.0
    for one in ordered:
        if one.begin > end:
            gaps.append(one.begin - end)
        busy += max(0.0, one.end - max(end, one.begin))
        end = max(end, one.end)
    whole = end - ordered[0].begin if ordered else 0.0
    longest = sorted(gaps, reverse=True)[: max(1, num_passes - 1)]
    return Timeline(
        num_passes,
        whole / num_passes,
        busy / num_passes,
        sum(gaps) / num_passes,
        _median(longest),
        sum(_length(ordered, "HtoD")) / num_passes,
        sum(_length(ordered, "DtoH")) / num_passes,
    )


def _length(intervals: Sequence[Interval], name: str) -> list[float]:
    return [one.end - one.begin for one in intervals if name in one.name]


def _median(values: Sequence[float]) -> float:
    """Of values in order; 0 of none."""
    return values[len(values) // 2] if values else 0.0
