"""Which decode rows can be planned before their newest token is back."""

from __future__ import annotations

import numpy as np
import pytest

from procengine.row_features import GRAMMAR
from procengine.scheduler.ready_rows import ready_rows
from procengine.scheduler.slot_table import SlotTable

BACK, UNDER_WAY = 0, 1  # results that a row still waits for


@pytest.mark.parametrize(
    ("rows", "speculates", "ready", "must_wait"),
    [
        # (has a grammar, results under way) of slots 0, 1, ...
        ([(False, UNDER_WAY), (False, BACK)], False, [0, 1], [False, False]),
        ([(True, UNDER_WAY), (False, UNDER_WAY), (True, BACK)], False, [1, 2], [False, True]),
        ([(False, UNDER_WAY), (False, BACK), (True, BACK)], True, [1, 2], [True, True]),
        ([(True, UNDER_WAY)], False, [], []),
        ([], True, [], []),
    ],
)
def test_rows_that_wait_for_their_token_are_left_out(
    rows: list[tuple[bool, int]], speculates: bool, ready: list[int], must_wait: list[bool]
) -> None:
    table = SlotTable(4, 64, 16)
    for slot, (has_grammar, num_under_way) in enumerate(rows):
        table.features[slot] = GRAMMAR if has_grammar else 0
        table.num_tokens[slot] = 10
        table.num_computed[slot] = 9 + num_under_way
    slots, waits = ready_rows(table, np.arange(len(rows)), speculates=speculates)
    assert (slots.tolist(), waits.tolist()) == (ready, must_wait)
