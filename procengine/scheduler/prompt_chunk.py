"""The next piece of a request's prompt, as a step computes it."""

from __future__ import annotations

import numpy as np

from procengine.request import Request
from procengine.scheduler.plan import PrefillChunk
from procengine.scheduler.slot_table import SlotTable

__all__ = ["plan_prompt_chunk"]

_NO_TOKENS = np.zeros(0, np.int32)


def plan_prompt_chunk(table: SlotTable, request: Request, length: int) -> PrefillChunk:
    """So many known tokens of a running request; they count as computed, and scored, from here on. With the last of
    them it yields a token."""
    slot = request.slot
    start = int(table.num_computed[slot])
    end = start + length
    targets = request.prompt_token_ids[start + 1 : end + 1] if request.wants_prompt_logits else _NO_TOKENS
    request.num_scored_tokens = max(request.num_scored_tokens, end)
    table.num_computed[slot] = end
    is_last = end == table.num_tokens[slot]
    return PrefillChunk(
        slot, start, table.token_ids[slot, start:end], int(is_last), targets, request.num_prompt_logprobs
    )
