"""`TraceWriter`: events of the Chrome Trace Event Format. Pure.

Owns: how an event looks, and their order. Never does: know what they stand for.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Google, 2016). Used of it: "X"
slices, properly nested in each track; "s", "t", "f" arrows, bound to the slice around them (bp "e"); "C" counters; "M"
names. `ts` and `dur` are microseconds with three decimals; events are sorted by `ts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["Event", "TraceWriter", "Track"]

Event = dict[str, Any]


class Track(NamedTuple):
    """A thread of a process; numbers need not be those of the system."""

    pid: int
    tid: int


class TraceWriter:
    """Collects events; times are CLOCK_MONOTONIC ns until `finish`."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, Event]] = []  # time, order at that time (outer slices first), event
        self._names: list[Event] = []
        self._num_flows = 0

    def slice(self, track: Track, name: str, begin_ns: int, end_ns: int, args: Event | None = None) -> None:
        """A stretch of time; within a track, slices lie inside each other or apart."""
        event: Event = {"ph": "X", "pid": track.pid, "tid": track.tid, "name": name, "dur": (end_ns - begin_ns) / 1e3}
        if args:
            event["args"] = args
        self._events.append((begin_ns, begin_ns - end_ns, event))

    def parts(self, track: Track, bounds_ns: Iterable[int], names: Iterable[str]) -> None:
        """Slices that follow each other; those without length are left out."""
        bounds = list(bounds_ns)
        for name, begin, end in zip(names, bounds, bounds[1:], strict=False):
            if end > begin:
                self.slice(track, name, begin, end)

    def counter(self, track: Track, name: str, time_ns: int, value: int) -> None:
        """A value that holds until the next one of the same name and process."""
        event = {"ph": "C", "pid": track.pid, "tid": track.tid, "name": name, "args": {"value": value}}
        self._events.append((time_ns, 1, event))

    def flow(self, category: str, name: str, points: Iterable[tuple[int, Track]]) -> None:
        """An arrow through the slices around these points; fewer than two make none."""
        at = sorted(points)
        if len(at) < 2:
            return
        self._num_flows += 1
        phases = ["s", *["t"] * (len(at) - 2), "f"]
        for phase, (time_ns, track) in zip(phases, at, strict=True):
            event: Event = {
                "ph": phase,
                "pid": track.pid,
                "tid": track.tid,
                "cat": category,
                "name": name,
                "id": self._num_flows,
            }
            if phase != "s":
                event["bp"] = "e"
            self._events.append((time_ns, 2, event))

    def name(self, kind: str, track: Track, **args: str | int) -> None:
        """Of a process or thread: `kind` is process_name, thread_name, process_sort_index or thread_sort_index."""
        self._names.append({"ph": "M", "pid": track.pid, "tid": track.tid, "ts": 0, "name": kind, "args": args})

    def finish(self, origin_ns: int | None) -> list[Event]:
        """All events, names first, in order of time; `ts` counts from `origin_ns`, None: from the first."""
        self._events.sort(key=lambda each: each[:2])
        if origin_ns is None:
            origin_ns = self._events[0][0] if self._events else 0
        for time_ns, _, event in self._events:
            event["ts"] = (time_ns - origin_ns) / 1e3
        return [*self._names, *(event for *_, event in self._events)]
