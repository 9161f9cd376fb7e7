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

__all__ = ["plan_drafts", "propose_drafts", "settle_drafts"]

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


def plan_drafts(
    table: SlotTable, slots: Slots, drafts: dict[int, Int32s], budget: int
) -> tuple[list[PrefillChunk], Slots, Int32s]:
    """Turn rows with proposals into chunks that sample everywhere, as long as proposals fit into `budget` tokens.

    Returns:
        The chunks, and the rows that are left with a pass each: one whose proposals find no room is an ordinary one.
    """
    chunks: list[PrefillChunk] = []
    is_left = np.ones(slots.size, np.bool_)
    for row, slot in enumerate(slots.tolist()):
        if budget <= 0:
            break
        if slot in drafts:
            chunks.append(_draft_chunk(table, slot, drafts[slot][:budget]))
            budget -= chunks[-1].token_ids.size - 1
            is_left[row] = False
    return chunks, slots[is_left], np.ones(np.count_nonzero(is_left), np.int32)


def _draft_chunk(table: SlotTable, slot: int, proposed: Int32s) -> PrefillChunk:
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
