"""`DeadlineQueue`: what is due when. Pure.

Owns: the order of deadlines. Never does: read a clock, or know what a deadline is of.

Nobody tells it when something ends that had a deadline: it asks, about the next ones when it is looked at, and about
all when it has become much longer than what still lives.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

__all__ = ["DeadlineQueue"]

T = TypeVar("T")
_FEW = 64


class DeadlineQueue(Generic[T]):
    """A heap. `is_over` says of an item that its deadline means nothing any more."""

    def __init__(self, is_over: Callable[[T], bool]) -> None:
        self._is_over = is_over
        self._heap: list[tuple[int, int, T]] = []
        self._ticket = count()  # equal deadlines come in the order they were added
        self._prune_at = _FEW

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline_ns: int, item: T) -> None:
        """An item that is due then, unless it is over before."""
        heapq.heappush(self._heap, (deadline_ns, next(self._ticket), item))
        if len(self._heap) > self._prune_at:
            self._heap = [entry for entry in self._heap if not self._is_over(entry[2])]
            heapq.heapify(self._heap)
            self._prune_at = max(2 * len(self._heap), _FEW)

    def next_ns(self) -> int | None:
        """The earliest deadline of an item that is not over; None if there is none."""
        while self._heap and self._is_over(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ns: int) -> list[T]:
        """Take out all that is due and not over, earliest first."""
        due: list[T] = []
        while (next_ns := self.next_ns()) is not None and next_ns <= now_ns:
            due.append(heapq.heappop(self._heap)[2])
        return due
