"""`OutputSuspects`: which request is it that kills output processes? Pure.

Owns: the memory of what those were at work on when they died. Never does: end a request.

The first output process notes nothing, so that a request costs nothing. One that took the place of a dead one notes
whose text it is about to work on, for as long as deaths count. A death at no request's text was another cause's, and
clears everybody: two deaths at the same text with no such death between them are not chance.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

__all__ = ["OutputSuspects"]

_MAX_DEATHS: Final = 2


class OutputSuspects:
    """Deaths by request, of late."""

    def __init__(self) -> None:
        self._deaths_by_key: Counter[int] = Counter()

    def blame(self, key: int) -> bool:
        """An output process died at work on this request; -1: on none. Whether the request is the cause."""
        if key < 0:
            self._deaths_by_key.clear()
            return False
        self._deaths_by_key[key] += 1
        if self._deaths_by_key[key] < _MAX_DEATHS:
            return False
        del self._deaths_by_key[key]
        return True
