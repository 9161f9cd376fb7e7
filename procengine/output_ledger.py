"""`OutputLedger`: what the output process was told of each request, in case another one must be told again.

Owns: how long that is kept. Never does: send anything, or look at text.

The frontend is done with a request when its last token is here; the output process may be behind, may miss a token, or
may die before its client has read everything. So a request is kept until the output process says that its end was
sent, and the newest of those for a while longer: what a process has sent may not have left it when it dies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from procengine.messages import Admitted, Finish, Register, decode_from_frontend, encode

__all__ = ["LedgerEntry", "OutputLedger"]

_MAX_TOKENS = 4 << 20
_NUM_DELIVERED = 256


@dataclass(slots=True)
class LedgerEntry:
    """One request.

    Attributes:
        registered: its Register, as bytes: much smaller than the object.
        num_prompt_tokens: where its output begins.
        wants_logprobs: whether its tokens alone are not all that the client wants.
        token_ids: int32 [n], prompt and output of one that has ended.
        finish: how it was ended from outside; None if its tokens say it, or it has not ended.
        is_delivered: the client was sent its end.
        body, seed: what the client asked for and what was drawn for it, for crash records.
        finish_reason: how it ended; "" while it runs.
        is_condemned: it kills output processes, so that nothing of it is told but that it has failed.
    """

    registered: bytes
    num_prompt_tokens: int
    wants_logprobs: bool
    is_admitted: bool = False
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    admitted_ns: int = 0
    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    finish: Finish | None = None
    is_delivered: bool = False
    is_condemned: bool = False
    body: Any = None
    seed: int = 0
    finish_reason: str = ""

    def admitted(self, key: int) -> Admitted | None:
        """The Admitted messages it had, in one; None if there was none."""
        if not self.is_admitted:
            return None
        return Admitted([key], [self.num_cached_tokens], self.admitted_ns, (self.num_preemptions,))


class OutputLedger:
    """Running requests, those that ended, and the newest delivered ones; `max_tokens` bounds the last two together."""

    def __init__(self, max_tokens: int = _MAX_TOKENS, num_delivered: int = _NUM_DELIVERED) -> None:
        self._max_tokens = max_tokens
        self._max_delivered = num_delivered
        self._running: dict[int, LedgerEntry] = {}
        self._ended: OrderedDict[int, LedgerEntry] = OrderedDict()
        self._delivered: OrderedDict[int, LedgerEntry] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_undelivered(self) -> int:
        """Requests that ended and whose clients may not know it yet."""
        return len(self._ended)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client of any request that is kept wants log probabilities."""
        return any(entry.wants_logprobs for _, entry in chain(self.running(), self.ended()))

    def register(self, register: Register, body: Any = None, seed: int = 0) -> None:
        """The output process hears of a request, which came with this body."""
        self._running[register.key] = LedgerEntry(
            encode(register),
            len(register.prompt_token_ids),
            wants_logprobs=register.num_logprobs >= 0,
            body=body,
            seed=seed,
        )

    def registered(self, key: int) -> bytes:
        """The encoded Register of a running request."""
        return self._running[key].registered

    def admit(self, message: Admitted) -> None:
        """It hears that these got a slot."""
        for key, num_cached_tokens, num_preemptions in zip(
            message.keys, message.num_cached_tokens, message.num_preemptions, strict=True
        ):
            entry = self._running[key]
            if not entry.is_admitted:
                entry.num_cached_tokens, entry.admitted_ns = num_cached_tokens, message.sent_ns
            entry.is_admitted, entry.num_preemptions = True, num_preemptions

    def end(self, key: int, token_ids: NDArray[np.int32], finish: Finish | None = None, reason: str = "") -> None:
        """A request ended with these tokens, int32 [n], which are kept; `finish` if the tokens do not say so."""
        entry = self._running.pop(key)
        entry.finish_reason = reason
        entry.token_ids, entry.finish = token_ids, finish
        (self._delivered if entry.is_delivered else self._ended)[key] = entry
        self._num_tokens += token_ids.size
        self._forget_oldest()

    def deliver(self, keys: Iterable[int]) -> None:
        """The output process has sent their ends. It may see an end before the frontend does."""
        for key in keys:
            entry = self._ended.pop(key, None)
            if entry is not None:
                self._delivered[key] = entry
            elif (running := self._running.get(key)) is not None:
                running.is_delivered = True
        self._forget_oldest()

    def condemn(self, finish: Finish) -> None:
        """A request that has ended is not to be told again, but for this end. One that is not kept is none any more."""
        entry = self._ended.get(finish.key) or self._delivered.get(finish.key)
        if entry is None:
            return
        register = decode_from_frontend(entry.registered)
        assert isinstance(register, Register)
        entry.registered, entry.body = encode(_bare(register)), None
        entry.finish, entry.is_condemned, entry.wants_logprobs = finish, True, False
        self._num_tokens -= entry.token_ids.size
        entry.token_ids = np.empty(0, np.int32)

    def ended_tokens(self, key: int) -> NDArray[np.int32] | None:
        """All tokens of a request that ended, if they are still here."""
        entry = self._ended.get(key) or self._delivered.get(key)
        return None if entry is None else entry.token_ids

    def running(self) -> Iterator[tuple[int, LedgerEntry]]:
        """Requests that have not ended, oldest first."""
        return iter(self._running.items())

    def ended(self) -> Iterator[tuple[int, LedgerEntry]]:
        """Requests that have, as far as they are kept."""
        yield from self._delivered.items()
        yield from self._ended.items()

    def _forget_oldest(self) -> None:
        while len(self._delivered) > self._max_delivered or self._num_tokens > self._max_tokens:
            _, forgotten = (self._delivered or self._ended).popitem(last=False)
            self._num_tokens -= forgotten.token_ids.size


def _bare(register: Register) -> Register:
    """Whose request it is, without anything to make a text of."""
    return msgspec.structs.replace(
        register, prompt_token_ids=[], stop=(), num_logprobs=-1, num_prompt_logprobs=-1, detokenize=False, echo=False
    )
