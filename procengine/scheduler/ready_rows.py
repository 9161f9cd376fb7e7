"""Decode rows that cannot be planned ahead: their newest token must be back before anything may follow it.

A grammar has to see the token to know which may come next; a proposal continues the text that ends with it. All other
rows are planned while theirs are still at the worker.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.row_features import GRAMMAR
from procengine.scheduler.slot_table import Slots, SlotTable

__all__ = ["ready_rows"]


def ready_rows(table: SlotTable, slots: Slots, *, speculates: bool) -> tuple[Slots, NDArray[np.bool_]]:
    """Those of the decode rows `slots`, intp [n], that can be planned now.

    Args:
        speculates: every row waits, as every one may try proposed tokens; otherwise those with a grammar do.

    Returns:
        intp [m], in the same order, and bool [m]: which of them go on by one pass alone, for the next must wait again.
    """
    must_wait = np.ones(slots.size, np.bool_) if speculates else (table.features[slots] & GRAMMAR) != 0
    is_ready = ~must_wait | (table.num_tokens[slots] == table.num_computed[slots] + 1)
    return slots[is_ready], must_wait[is_ready]
