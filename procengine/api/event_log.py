"""`EventLog`: the newest events of a stream, numbered, for a reader that has lost its connection. Pure.

Owns: numbers (from 1, without holes), and how much is kept. Never does: know what an event says.
"""

from __future__ import annotations

from collections import deque

__all__ = ["EventLog"]


class EventLog:
    """Keeps at most `max_bytes`, the newest; at least the last event."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._last = 0

    @property
    def last(self) -> int:
        """The number of the newest event; 0 before the first."""
        return self._last

    def add(self, data: bytes) -> bytes:
        """Take in whole events; returned with their numbers (the field `id` of server-sent events)."""
        added = []
        for event in data.split(b"\n\n")[:-1]:
            self._last += 1
            numbered = b"id: %d\n%b\n\n" % (self._last, event)
            added.append(numbered)
            self._events.append(numbered)
            self._num_bytes += len(numbered)
        while self._num_bytes > self._max_bytes and len(self._events) > 1:
            self._num_bytes -= len(self._events.popleft())
        return b"".join(added)

    def since(self, number: int) -> bytes | None:
        """What came behind an event; None if the first of it is not kept any more."""
        num_wanted = self._last - number
        if num_wanted > len(self._events):
            return None
        return b"".join(list(self._events)[len(self._events) - num_wanted :])
