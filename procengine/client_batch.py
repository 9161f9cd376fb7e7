"""`Batch`: requests of one call that are waited for together.

Owns: how many of them have ended, and whether one has failed. Never does: send, receive or wait.
"""

from __future__ import annotations

from collections.abc import Callable

from procengine.client_core import Pending

__all__ = ["Batch"]


class Batch:
    """Requests that are waited for together."""

    def __init__(self, on_end: Callable[[], object] | None) -> None:
        self.members: list[Pending] = []
        self._num_ended = 0
        self._has_failed = False
        self._on_end = on_end

    def take_end(self, pending: Pending) -> None:
        """A member has ended; called by whoever receives."""
        self._num_ended += 1
        self._has_failed |= pending.error is not None
        if self._on_end is not None:
            self._on_end()

    def is_settled(self) -> bool:
        """Whether all have ended, or one has failed."""
        return self._has_failed or self._num_ended == len(self.members)
