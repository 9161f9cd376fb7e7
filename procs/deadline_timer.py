"""`DeadlineTimer`: one timer at the earliest deadline, and none where there is none.

Wiring only: `DeadlineQueue` knows what is due.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from procengine.deadlines import DeadlineQueue

__all__ = ["DeadlineTimer"]

T = TypeVar("T")
_ROUNDING_S = 1e-3  # the loop counts in milliseconds, and would wake before the time


class DeadlineTimer(Generic[T]):
    """Calls `on_due` with items as their time comes. `is_over` says of an item that nobody waits for it any more."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, is_over: Callable[[T], bool], on_due: Callable[[T], None]
    ) -> None:
        self._loop = loop
        self._on_due = on_due
        self._queue = DeadlineQueue(is_over)
        self._handle: asyncio.TimerHandle | None = None
        self._armed_ns = 0

    def add(self, deadline_ns: int, item: T) -> None:
        """An item that is due then (CLOCK_MONOTONIC)."""
        self._queue.add(deadline_ns, item)
        self._arm()

    def settle(self) -> None:
        """Something may be over: do not wake up for it."""
        if self._handle is not None:
            self._arm()

    def _arm(self) -> None:
        next_ns = self._queue.next_ns()
        if self._handle is not None:
            if next_ns == self._armed_ns:
                return
            self._handle.cancel()
            self._handle = None
        if next_ns is not None:
            self._armed_ns = next_ns
            self._handle = self._loop.call_later(max(next_ns - time.monotonic_ns(), 0) / 1e9 + _ROUNDING_S, self._wake)

    def _wake(self) -> None:
        self._handle = None
        for item in self._queue.take_due(time.monotonic_ns()):
            self._on_due(item)
        self._arm()
