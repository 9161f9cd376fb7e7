"""Rows that try proposed tokens: which may, what they send, and what is left of it afterwards.

Owns: the bookkeeping of speculation in the slot table. Never does: find a proposal (`speculation`) or accept one (the
worker). A row with proposals yields as many tokens as agree and one more, so it is planned again when they are back.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.row_features import SAMPLING
from procengine.scheduler.plan import PrefillChunk
from procengine.scheduler.slot_table import Slots, SlotTable
from procengine.speculation import propose

__all__ = ["draft_chunk", "propose_drafts", "settle_drafts"]

Int32s = NDArray[np.int32]


def propose_drafts(table: SlotTable, slots: Slots, num_left: Int32s, max_tokens: int) -> dict[int, Int32s]:
    """Proposed tokens by slot, at most `max_tokens` and never up to the row's end.

    Rows whose logits depend on the tokens before them (penalties, grammars) get none: a proposal would change them.
    """
    drafts: dict[int, Int32s] = {}
    if not max_tokens:
        return drafts
    can_draft = ((table.features[slots] & ~SAMPLING) == 0) & (table.num_logprobs[slots] < 0) & (num_left > 1)
    for slot, left in zip(slots[can_draft].tolist(), num_left[can_draft].tolist(), strict=True):
        proposed = propose(table.token_ids[slot, : table.num_tokens[slot]], min(max_tokens, left - 1))
        if proposed.size:
            drafts[slot] = proposed
    return drafts


def draft_chunk(table: SlotTable, slot: int, proposed: Int32s) -> PrefillChunk:
    """The row's newest token and the proposals behind it, all sampled; they count as computed until settled."""
    start = int(table.num_computed[slot])
    token_ids = np.append(table.token_ids[slot, start], proposed)
    table.num_computed[slot] = start + token_ids.size
    table.has_drafts[slot] = True
    return PrefillChunk(slot, start, token_ids, num_samples=token_ids.size)


def settle_drafts(table: SlotTable, slots: Slots, keys: NDArray[np.int64]) -> None:
    """All tokens of these rows' drafts are taken in: what was proposed and not accepted was not computed."""
    drafted = slots[(table.keys[slots] == keys) & table.has_drafts[slots]]
    table.num_computed[drafted] = table.num_tokens[drafted] - 1
    table.has_drafts[drafted] = False
