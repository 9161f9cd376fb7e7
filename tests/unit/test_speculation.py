"""Prompt lookup: what followed the latest earlier occurrence of the longest tail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procengine.speculation import propose


def plain_propose(token_ids: list[int], count: int) -> list[int]:
    for length in (4, 3, 2):
        tail = token_ids[-length:]
        if len(tail) < length:
            continue
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == tail:
                return token_ids[start + length : start + length + count]
    return []


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 8))
def test_proposal_is_that_of_a_plain_search(token_ids: list[int], count: int) -> None:
    array = np.array(token_ids, np.int32)
    proposed = propose(array, count)
    assert proposed.tolist() == plain_propose(token_ids, count)
    assert proposed.dtype == np.int32
    assert array.tolist() == token_ids


@pytest.mark.parametrize(
    ("token_ids", "count", "proposed"),
    [
        ([], 4, []),
        ([1], 4, []),
        ([1, 1], 4, []),
        ([1, 1, 1], 4, [1]),  # the occurrence may overlap the tail, and ends where the tokens end
        ([1, 2, 3, 1, 2], 4, [3, 1, 2]),
        ([1, 2, 3, 1, 2], 1, [3]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1]),  # the latest
        ([1, 2, 3, 4, 5, 9, 3, 4, 6, 1, 2, 3, 4], 1, [5]),  # the longest before the latest
        ([1, 2, 3], 4, []),
    ],
)
def test_examples(token_ids: list[int], count: int, proposed: list[int]) -> None:
    assert propose(np.array(token_ids, np.int32), count).tolist() == proposed
