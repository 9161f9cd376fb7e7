"""`LoneSuspects`: a request that may have killed workers runs alone until it is past the place where they died.

Owns: which suspect has the worker for itself. Never does: decide who is one (`Request.is_suspect`), or end a request.
"""

from __future__ import annotations

from procengine.request import NO_SLOT, Request
from procengine.scheduler.slot_table import SlotTable

__all__ = ["LoneSuspects"]


class LoneSuspects:
    """At most one at a time."""

    def __init__(self) -> None:
        self._running: Request | None = None

    def enter(self, request: Request) -> None:
        """A request, suspect or not, got its slot."""
        if request.is_suspect:
            self._running = request

    def let_in(self, request: Request, table: SlotTable) -> bool:
        """Whether `request` may run beside the residents of `table`. A suspect that is past its place, or has ended
        without the worker's death, is cleared.
        """
        suspect = self._running
        if suspect is not None:
            if suspect.slot != NO_SLOT and table.num_tokens[suspect.slot] < suspect.death_position:
                return False
            suspect.num_worker_deaths = 0
            self._running = None
        return not (request.is_suspect and table.num_vacant < table.max_num_seqs)
