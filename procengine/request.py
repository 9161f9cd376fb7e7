"""`Request`: one sequence to generate, as the frontend holds it.

Owns: what a request is and, while it has no slot, how far it got. While it has a slot, its progress is in `SlotTable`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_ADAPTER", "NO_SLOT", "Request", "RowRules", "RowSampling", "TokenMasks"]

NO_SLOT = -1
NO_ADAPTER = -1


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling values of one row, as the worker needs them. `features` are bits of `row_features`, 0 for greedy."""

    seed: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_logprobs: int = -1  # -1 is none
    features: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class RowRules:
    """Rules about single tokens, which few requests have.

    Attributes:
        logit_bias: (token id, added to its logit).
        allowed_token_ids: no other token is generated; None is no such rule.
        early_stop_ids: not generated before `min_position`.
        bad_words: token sequences whose last token is not generated behind the others.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    early_stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


class TokenMasks(Protocol):
    """A grammar at work: which tokens may come next."""

    @property
    def num_mask_words(self) -> int: ...
    def fill_mask(self, row: NDArray[np.int32]) -> None: ...
    def consume(self, token_id: int) -> None: ...


_NO_RULES = RowRules()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence.

    Attributes:
        key: never reused; also the arrival order.
        prompt_token_ids: int32 [prompt].
        end_position: the sequence is complete when it has this many tokens.
        min_position: stop tokens before this position do not end it.
        stop_token_ids: ids that end it.
        grammar: what its tokens must obey; None is nothing.
        num_prompt_logprobs: alternatives to show for each prompt token; -1 is no prompt logprobs.
        adapter: place of its LoRA adapter in the workers.
        turn: its place in the queue of a worker, see `PromptQueue`; None: it was in none, or there are no turns.
        token_ids: int32 [n], prompt and confirmed output; stale while the request has a slot.
        num_in_flight: results that a worker still owes, kept only while the request has no slot.
        block_hashes: content addresses of the full blocks of `token_ids`.
        num_cached_tokens: prompt tokens found in the cache at the first admission; None before it.
        num_scored_tokens: prompt tokens whose logits were computed for this request.
        num_worker_deaths: workers that died while this request was running on them, all at the same place in it.
        death_position: that place: with so many tokens it is past it.
    """

    key: int
    client: bytes
    request_id: str
    prompt_token_ids: NDArray[np.int32]
    end_position: int
    sampling: RowSampling
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    index: int = 0
    cache_salt: bytes = b""
    min_position: int = 0
    rules: RowRules = _NO_RULES
    grammar: TokenMasks | None = None
    num_prompt_logprobs: int = -1
    adapter: int = NO_ADAPTER
    turn: int | None = None
    token_ids: NDArray[np.int32] = field(init=False)
    block_hashes: list[bytes] = field(default_factory=list)
    num_in_flight: int = 0
    slot: int = NO_SLOT
    is_finished: bool = False
    num_cached_tokens: int | None = None
    num_scored_tokens: int = 0
    num_preemptions: int = 0
    num_worker_deaths: int = 0
    death_position: int = 0

    def __post_init__(self) -> None:
        self.token_ids = self.prompt_token_ids

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether prompt logprobs are asked for and not all computed yet."""
        return self.num_prompt_logprobs >= 0 and self.num_scored_tokens < self.prompt_token_ids.size

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what kills its workers. It runs alone until it is past `death_position`."""
        return self.num_worker_deaths > 1

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """Sort key of service: smaller is served first and preempted last. Others wait until suspects are cleared."""
        return (not self.is_suspect, self.priority, self.turn or 0, self.key)

    def note_worker_death(self, num_computed: int) -> None:
        """The worker it was running on died, with `num_computed` tokens computed or on the way (it has no slot now)."""
        if len(self.token_ids) >= self.death_position:
            self.num_worker_deaths = 0  # it has got further since the last one
        self.num_worker_deaths += 1
        self.death_position = max(num_computed + 2, len(self.token_ids) + 1)
