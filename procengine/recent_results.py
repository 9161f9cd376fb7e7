"""`RecentResults`: the newest results of all workers, as bytes, in case a process dies before they are everywhere.

Owns: how much is kept. Never does: decide who is to see them.

A worker sends each result to the frontend first and then to the output process. When it is killed, what reached the
first may never reach the second, so the frontend passes it on: positions that are known there are dropped. When the
output process is killed, its successor gets the log probabilities and vectors of the last moments from here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from procengine.messages import StepResult, decode_from_worker
from procengine.step_payload import RESULT_SECTIONS, cut_sections, join_int64

__all__ = ["RecentResults", "first_logprob_positions"]

_MAX_RESULTS = 4096  # some ten seconds of steps: as long as an output process may be behind
_MAX_BYTES = 16 << 20  # with many log probabilities a result is large

Frames = tuple[bytes, bytes]


class RecentResults:
    """A queue, in order of arrival, that forgets its oldest entries."""

    def __init__(self, max_results: int = _MAX_RESULTS, max_bytes: int = _MAX_BYTES) -> None:
        self._results: deque[tuple[int, bytes, bytes]] = deque(maxlen=max_results)
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def add(self, rank: int, header: bytes, payload: bytes) -> None:
        """The next result, of worker `rank`."""
        results = self._results
        if len(results) == results.maxlen:
            self._forget_oldest()
        results.append((rank, header, payload))
        self._num_bytes += len(payload)
        while self._num_bytes > self._max_bytes:
            self._forget_oldest()

    def all(self) -> list[Frames]:
        """All that is kept, oldest first."""
        return [(header, payload) for _, header, payload in self._results]

    def of_worker(self, rank: int) -> list[Frames]:
        """What is kept of one worker, oldest first."""
        return [(header, payload) for sender, header, payload in self._results if sender == rank]

    def _forget_oldest(self) -> None:
        self._num_bytes -= len(self._results.popleft()[2])


def first_logprob_positions(results: Iterable[Frames]) -> dict[int, int]:
    """By request key, the first position whose log probabilities are in these results."""
    first: dict[int, int] = {}
    for header_bytes, payload in results:
        header = decode_from_worker(header_bytes)
        if not isinstance(header, StepResult):
            continue
        sections = cut_sections(RESULT_SECTIONS, header.sizes, np.frombuffer(payload, np.int32))
        rows = sections["logprob_rows"]
        if rows.size:
            keys, positions = join_int64(sections["key_words"])[rows], sections["positions"][rows]
            for key, position in zip(keys.tolist(), positions.tolist(), strict=True):
                first.setdefault(key, position)
    return first
