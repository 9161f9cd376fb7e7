"""N-gram speculation: what followed the last time that the same tokens stood here.

Owns: the proposal. Never does: verify it: the worker samples at every proposed position, and since a token is a
function of its position's logits and (seed, position), what agrees is exactly what plain decoding would have given.
Prompt lookup decoding: A. Saxena, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["propose"]

_MAX_NGRAM = 4
_MIN_NGRAM = 2


def propose(token_ids: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Up to `count` tokens that may follow `token_ids`, both int32 [n]; empty if nothing is known.

    They are what came after the latest earlier occurrence of its last 4, else 3, else 2 tokens.
    """
    size = token_ids.size
    for length in range(min(_MAX_NGRAM, size - 1), _MIN_NGRAM - 1, -1):
        starts = size - length  # candidate starts are 0 .. starts - 1: the occurrence must lie before the last one
        matches = token_ids[:starts] == token_ids[size - length]
        for at in range(1, length):
            matches &= token_ids[at : starts + at] == token_ids[size - length + at]
        found = np.flatnonzero(matches)
        if found.size:
            after = int(found[-1]) + length
            return token_ids[after : after + count]
    return token_ids[:0]
