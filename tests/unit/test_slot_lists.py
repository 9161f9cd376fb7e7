"""What a request's rules become on the wire, rule by rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from procengine.request import Request, RowRules, RowSampling
from procengine.row_features import BAD_WORDS, BIAS, EARLY_STOPS, GRAMMAR, PENALTIES, SAMPLING
from procengine.slot_lists import float32_bits, slot_lists
from procengine.step_payload import SlotList, iter_slot_lists

INF = float("inf")


def request(features: int, slot: int = 3, output: tuple[int, ...] = (), **rules: Any) -> Request:
    made = Request(
        0, b"", "0", np.array([7, 8, 9], np.int32), 20, RowSampling(0, features=features), rules=RowRules(**rules)
    )
    made.min_position = 5
    made.slot = slot
    made.token_ids = np.array([7, 8, 9, *output], np.int32)
    return made


def records(*requests: Request) -> list[tuple[SlotList, int, list[int]]]:
    section = slot_lists(requests)
    assert section.dtype == np.int32
    return [(kind, slot, data.tolist()) for kind, slot, data in iter_slot_lists(section)]


def bits(*values: float) -> list[int]:
    return np.array(values, np.float32).view(np.int32).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("features", [0, SAMPLING, GRAMMAR, SAMPLING | GRAMMAR])
def test_row_without_rules_has_no_record(features: int) -> None:
    assert slot_lists([request(features, logit_bias=((1, 2.0),), bad_words=((4,),))]).size == 0
    assert slot_lists([]).size == 0


def test_penalties_bring_the_history_and_where_the_prompt_ends() -> None:
    assert records(request(PENALTIES)) == [(SlotList.HISTORY, 3, [3, 7, 8, 9])]
    assert records(request(PENALTIES, output=(5, 6))) == [(SlotList.HISTORY, 3, [3, 7, 8, 9, 5, 6])]


def test_bad_words_come_before_the_history_they_need() -> None:
    found = records(request(BAD_WORDS | PENALTIES, bad_words=((4,), (1, 2, 3))))
    assert found == [
        (SlotList.BAD_WORD, 3, [4]),
        (SlotList.BAD_WORD, 3, [1, 2, 3]),
        (SlotList.HISTORY, 3, [3, 7, 8, 9]),
    ]


@pytest.mark.parametrize(
    ("bias", "allowed", "fill", "pairs"),
    [
        (((5, 1.5), (0, -100.0)), None, 0.0, [(5, 1.5), (0, -100.0)]),
        ((), (4, 2), -INF, [(4, 0.0), (2, 0.0)]),
        (((4, 2.5), (9, 1.0)), (4, 2), -INF, [(4, 2.5), (2, 0.0)]),  # what is not allowed stays so
    ],
)
def test_bias_says_what_all_get_and_who_gets_something_else(
    bias: Any, allowed: Any, fill: float, pairs: list[tuple[int, float]]
) -> None:
    (found,) = records(request(BIAS, logit_bias=bias, allowed_token_ids=allowed))
    assert found == (
        SlotList.BIAS,
        3,
        [*bits(fill), *(word for token, value in pairs for word in (token, *bits(value)))],
    )


@pytest.mark.parametrize("stops", [(), (2,), tuple(range(70))])
def test_early_stops_say_until_when(stops: tuple[int, ...]) -> None:
    assert records(request(EARLY_STOPS, early_stop_ids=stops)) == [(SlotList.EARLY_STOPS, 3, [5, *stops])]


def test_requests_stand_one_behind_the_other() -> None:
    found = records(request(PENALTIES, 1), request(0, 2), request(EARLY_STOPS, 0, early_stop_ids=(4,)))
    assert [(kind, slot) for kind, slot, _ in found] == [(SlotList.HISTORY, 1), (SlotList.EARLY_STOPS, 0)]


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -1e30, INF, -INF, 0.1])
def test_bits_of_a_float(value: float) -> None:
    assert [float32_bits(value)] == bits(value)
