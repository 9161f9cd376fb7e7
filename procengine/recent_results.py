"""`RecentResults`: the newest results of one worker, as bytes, in case it dies before they are everywhere.

Owns: how much is kept. Never does: read them.

A worker sends each result to the frontend first and then to the output process. When it is killed, what reached the
first may never reach the second, so the frontend passes it on: positions that are known there are dropped.
"""

from __future__ import annotations

from collections import deque

__all__ = ["RecentResults"]

_MAX_RESULTS = 4096  # some ten seconds of steps: as long as an output process may be behind
_MAX_BYTES = 16 << 20  # with many log probabilities a result is large

Frames = tuple[bytes, bytes]


class RecentResults:
    """A queue that forgets its oldest entries."""

    def __init__(self, max_results: int = _MAX_RESULTS, max_bytes: int = _MAX_BYTES) -> None:
        self._results: deque[Frames] = deque(maxlen=max_results)
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def add(self, header: bytes, payload: bytes) -> None:
        """The next result."""
        results = self._results
        if len(results) == results.maxlen:
            self._forget_oldest()
        results.append((header, payload))
        self._num_bytes += len(payload)
        while self._num_bytes > self._max_bytes:
            self._forget_oldest()

    def take_all(self) -> list[Frames]:
        """All that is kept, oldest first; it is not kept any more."""
        taken = list(self._results)
        self._results.clear()
        self._num_bytes = 0
        return taken

    def _forget_oldest(self) -> None:
        self._num_bytes -= len(self._results.popleft()[1])
