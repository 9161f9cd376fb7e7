"""`WaitingQueue`: requests without a slot, in order of service.

Owns: who is next. Never does: count blocks or tokens.
"""

from __future__ import annotations

import heapq

from procengine.request import Request

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """A heap by `Request.order`. A finished request is dropped when it comes up, not searched for."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[bool, int, int, int], Request]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def holds_tokens(self, num_tokens: int) -> bool:
        """Whether those that wait have so many tokens, all together."""
        for _, request in self._heap:
            if num_tokens <= 0:
                break
            num_tokens -= 0 if request.is_finished else len(request.token_ids)
        return num_tokens <= 0

    def push(self, request: Request) -> None:
        """Add a new or preempted request."""
        self._num_waiting += 1
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """The request to serve next, still in the queue; None if there is none."""
        while self._heap and self._heap[0][1].is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Take out what `peek` returned."""
        self._num_waiting -= 1
        return heapq.heappop(self._heap)[1]

    def pop_all(self) -> list[Request]:
        """Take out everybody, in order."""
        taken = [request for _, request in sorted(self._heap, key=lambda entry: entry[0]) if not request.is_finished]
        self._heap.clear()
        self._num_waiting = 0
        return taken

    def remove(self, request: Request) -> None:
        """Forget a request that was just marked finished."""
        assert request.is_finished
        self._num_waiting -= 1
