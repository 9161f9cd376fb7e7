"""`GrammarRows`: running requests whose tokens obey a grammar: their masks, and what happens when a grammar gives up.

Owns: how many there are, and which failed. Never does: know a grammar beyond `TokenMasks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.errors import RequestFailedError
from procengine.request import Request
from procengine.scheduler.plan import StepPlan
from procengine.scheduler.slot_table import SlotTable

__all__ = ["GrammarRows"]


class GrammarRows:
    """Costs nothing while `num_running` is 0."""

    def __init__(self) -> None:
        self.num_running = 0
        self._failed: list[tuple[Request, str]] = []

    def enter(self, request: Request) -> None:
        """A request got its slot."""
        self.num_running += request.grammar is not None

    def leave(self, request: Request) -> None:
        """A request lost its slot."""
        self.num_running -= request.grammar is not None

    def mask(self, plan: StepPlan, table: SlotTable) -> None:
        """Add to a plan the masks of its samples."""
        for sample, slot in enumerate(plan.sample_slots().tolist()):
            request = table.requests[slot]
            if request is not None and request.grammar is not None:
                mask = np.zeros(request.grammar.num_mask_words, np.int32)
                self._ask(request, request.grammar.fill_mask, mask)
                plan.masked.append((sample, mask))

    def advance(self, table: SlotTable, slots: NDArray[np.intp], token_ids: NDArray[np.int32]) -> None:
        """These tokens came for the requests in these slots."""
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            request = table.requests[slot]
            if request is not None:
                self.consume(request, token_id)

    def consume(self, request: Request, token_id: int) -> None:
        """A token came for a request, which may have no grammar."""
        if request.grammar is not None:
            self._ask(request, request.grammar.consume, token_id)

    def take_failed(self) -> list[tuple[Request, str]]:
        """Requests that cannot go on, and why; to be finished by the caller."""
        failed, self._failed = self._failed, []
        return failed

    def _ask(self, request: Request, ask: Callable[[Any], None], argument: Any) -> None:
        """Run a grammar, which may give up on a text. Then its request must end; what the row samples is dropped."""
        try:
            ask(argument)
        except RequestFailedError as error:
            self._failed.append((request, str(error)))
