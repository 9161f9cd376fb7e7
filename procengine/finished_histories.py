"""`FinishedHistories`: the tokens of requests that ended a short while ago, for an output process that missed some.

Owns: how many are kept. Never does: know why a request ended.

The frontend is done with a request when its last token is here; the output process may be behind, and may find later
that a token got lost on its way to it.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

__all__ = ["FinishedHistories"]

_MAX_TOKENS = 4 << 20


class FinishedHistories:
    """Forgets the oldest ones when it holds more than `max_tokens` tokens."""

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        self._histories: OrderedDict[int, NDArray[np.int32]] = OrderedDict()
        self._max_tokens = max_tokens
        self._num_tokens = 0

    def add(self, key: int, token_ids: NDArray[np.int32]) -> None:
        """A request ended with these tokens, int32 [n]; the array is kept."""
        self._histories[key] = token_ids
        self._num_tokens += token_ids.size
        while self._num_tokens > self._max_tokens:
            _, forgotten = self._histories.popitem(last=False)
            self._num_tokens -= forgotten.size

    def get(self, key: int) -> NDArray[np.int32] | None:
        """All tokens of a request, if they are still here."""
        return self._histories.get(key)
