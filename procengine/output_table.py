"""`OutputTable`: finish limits and progress of all requests in the output process, as arrays.

Owns: the numbers that `check_finish` needs, a row a request. Never does: look at text.
"""

from __future__ import annotations

import numpy as np

from procengine.stopping import NO_TOKEN, FinishLimits

__all__ = ["OutputTable"]

_CLOSED = -1


class OutputTable:
    """Rows grow by doubling; a removed row is used again."""

    def __init__(self) -> None:
        self.next_positions = np.full(64, _CLOSED, np.int32)
        self._end_positions = np.zeros(64, np.int32)
        self._min_positions = np.zeros(64, np.int32)
        self._stop_token_ids = np.full((64, 4), NO_TOKEN, np.int32)
        self._vacant = list(range(63, -1, -1))

    def add(self, num_tokens: int, end_position: int, stop_token_ids: tuple[int, ...], min_position: int = 0) -> int:
        """A row for a sequence that has `num_tokens` tokens now. Returns its number."""
        if not self._vacant:
            self._grow_rows()
        self._grow_width(len(stop_token_ids))
        row = self._vacant.pop()
        self.next_positions[row] = num_tokens
        self._end_positions[row] = end_position
        self._min_positions[row] = min_position
        self._stop_token_ids[row] = NO_TOKEN
        self._stop_token_ids[row, : len(stop_token_ids)] = stop_token_ids
        return row

    def close(self, row: int) -> None:
        """The sequence is complete: no position matches this row any more."""
        self.next_positions[row] = np.iinfo(np.int32).max

    def remove(self, row: int) -> None:
        """Give the row back."""
        self.next_positions[row] = _CLOSED
        self._vacant.append(row)

    @property
    def limits(self) -> FinishLimits:
        """Of all rows, for `check_finish`."""
        return FinishLimits(self._end_positions, self._stop_token_ids, self._min_positions)

    def _grow_rows(self) -> None:
        count = self.next_positions.size
        self.next_positions = np.concatenate((self.next_positions, np.full(count, _CLOSED, np.int32)))
        self._end_positions = np.concatenate((self._end_positions, np.zeros(count, np.int32)))
        self._min_positions = np.concatenate((self._min_positions, np.zeros(count, np.int32)))
        blank = np.full(self._stop_token_ids.shape, NO_TOKEN, np.int32)
        self._stop_token_ids = np.concatenate((self._stop_token_ids, blank))
        self._vacant.extend(range(2 * count - 1, count - 1, -1))

    def _grow_width(self, width: int) -> None:
        have = self._stop_token_ids.shape[1]
        if width > have:
            grown = np.full((self._stop_token_ids.shape[0], width), NO_TOKEN, np.int32)
            grown[:, :have] = self._stop_token_ids
            self._stop_token_ids = grown
