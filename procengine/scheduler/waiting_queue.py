"""`WaitingQueue`: requests without a slot, in order of service, and those that wait for another one's prefix.

Owns: who is next. Never does: count blocks or tokens.
"""

from __future__ import annotations

import heapq

from procengine.request import Request

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """A heap by `Request.order`. A finished request is dropped when it comes up, not searched for.

    A request whose next prompt block is being computed by a running one is *parked* under that block's hash and comes
    back when the block is published or abandoned, so that a shared prompt is computed once.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._parked_by_hash: dict[bytes, list[Request]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, request: Request) -> None:
        """Add a new or preempted request."""
        self._num_waiting += 1
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """The request to serve next, still in the queue; None if none is ready."""
        while self._heap and self._heap[0][1].is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Take out what `peek` returned."""
        self._num_waiting -= 1
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        """Forget a request that was just marked finished."""
        assert request.is_finished
        self._num_waiting -= 1

    def begin_computing(self, hashes: list[bytes]) -> None:
        """A running request is going to compute these blocks."""
        for block_hash in hashes:
            self._parked_by_hash.setdefault(block_hash, [])

    def is_being_computed(self, block_hash: bytes) -> bool:
        """Whether some running request is going to publish this block."""
        return block_hash in self._parked_by_hash

    def park_next(self, block_hash: bytes) -> None:
        """Move the next request aside until the block with this hash is published or abandoned."""
        self._parked_by_hash[block_hash].append(heapq.heappop(self._heap)[1])

    def end_computing(self, hashes: list[bytes]) -> None:
        """These blocks are published, or nobody computes them any more: whoever waited is ready again."""
        for block_hash in hashes:
            for request in self._parked_by_hash.pop(block_hash, ()):
                if not request.is_finished:
                    heapq.heappush(self._heap, (request.order, request))
