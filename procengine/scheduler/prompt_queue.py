"""`PromptQueue`: whose prompt goes on next: that of a request that waits for a slot, or of one that has begun.

Owns: both kinds, in order of service, and the turns of that order. Never does: count blocks or slots.

A turn is a place in the stream of prompt tokens that come to this worker: the end of the request's own prompt, and 16
times as many tokens further on, but at most `max_overtaken_tokens`. So a short prompt may pass longer ones that came a
little earlier, and the bound is strict: prompts of one priority that come later than another and go before it have no
more tokens than that, all together. That is why the clock counts tokens that came, and not those that were computed:
between two steps that clock would stand still, and any number of prompts could pass at once.
"""

from __future__ import annotations

from bisect import insort

from procengine.request import Request
from procengine.scheduler.slot_table import SlotTable
from procengine.scheduler.waiting_queue import WaitingQueue

__all__ = ["PromptQueue"]

_LEAD_PER_TOKEN = 16


class PromptQueue:
    """Requests with tokens to compute that they had when they came, or when they were preempted.

    Attributes:
        waiting: those without a slot.
        begun: those with one, the next to be served first.
    """

    def __init__(self, max_overtaken_tokens: int) -> None:
        self.waiting = WaitingQueue()
        self.begun: list[Request] = []
        self._max_overtaken_tokens = max_overtaken_tokens
        self._clock = 0  # tokens that came so far

    def add(self, request: Request) -> None:
        """Queue a request that is new here, and give it its turn. Without turns all have the same."""
        if self._max_overtaken_tokens:
            num_tokens = len(request.token_ids)
            self._clock += num_tokens
            lead = request.turn  # what `take_turn` left of it, if it was queued elsewhere
            if lead is None:
                lead = min(_LEAD_PER_TOKEN * num_tokens, self._max_overtaken_tokens)
            request.turn = self._clock + lead
        self.waiting.push(request)

    def first(self, *, may_start: bool) -> Request | None:
        """Who is served next; one that has begun unless others `may_start`."""
        waiting = self.waiting.peek() if may_start else None
        begun = self.begun[0] if self.begun else None
        if begun is None or (waiting is not None and waiting.order < begun.order):
            return waiting
        return begun

    def hold_tokens(self, num_tokens: int, table: SlotTable) -> bool:
        """Whether so many tokens are left to compute for all of them together."""
        for request in self.begun:
            num_tokens -= int(table.num_tokens[request.slot] - table.num_computed[request.slot])
        return self.waiting.holds_tokens(num_tokens)

    def start(self) -> None:
        """The first of those that wait has a slot now."""
        insort(self.begun, self.waiting.pop(), key=lambda request: request.order)

    def take_turn(self, request: Request) -> None:
        """A request leaves, for another queue; until it is there, its turn counts from this clock. So those that leave
        together keep their order, and each is as old where it comes to as it was here: before most that wait there if
        it has waited or run for long, and passed by no more new ones than might still have passed it here.
        """
        if request.turn is not None:
            request.turn -= self._clock
