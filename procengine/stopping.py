"""The finish rule: one pure function that the frontend and the output process both apply, so they agree unasked.

Owns: when a sequence is complete by its tokens. Never does: look at text (that is `stop_strings`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FINISH_REASON", "NOT_FINISHED", "NO_TOKEN", "FinishLimits", "check_finish"]

NOT_FINISHED: Final = 0
STOP: Final = 1
LENGTH: Final = 2
FINISH_REASON: Final = {STOP: "stop", LENGTH: "length"}
NO_TOKEN: Final = -1  # pads rows of stop_token_ids


class FinishLimits(NamedTuple):
    """Limits of all rows of a table.

    Attributes:
        end_positions: int32 [rows], the number of tokens (prompt included) at which the sequence is complete.
        stop_token_ids: int32 [rows, width], ids that end the sequence, padded with NO_TOKEN.
        min_positions: int32 [rows], where such an id begins to count.
    """

    end_positions: NDArray[np.int32]
    stop_token_ids: NDArray[np.int32]
    min_positions: NDArray[np.int32]


def check_finish(
    token_ids: NDArray[np.int32], positions: NDArray[np.int32], limits: FinishLimits, rows: NDArray[np.intp]
) -> NDArray[np.int8]:
    """Whether each row's new token ends its sequence.

    Args:
        token_ids: int32 [n], the new tokens.
        positions: int32 [n], where they stand in their sequences, counted from 0.
        limits: of all rows.
        rows: intp [n], the rows the tokens are for.

    Returns:
        int8 [n]: NOT_FINISHED, STOP or LENGTH. A stop token at the last position is a STOP.
    """
    codes = (positions >= limits.end_positions[rows] - 1).view(np.int8) * np.int8(LENGTH)
    is_stop = limits.stop_token_ids.take(rows, axis=0) == token_ids[:, None]
    if is_stop.any():  # rare: the reduction by row is the dear part
        codes[is_stop.any(axis=1) & (positions >= limits.min_positions[rows])] = STOP
    return codes
