"""A process that misses four rounds in a row hangs; one that answers any of them does not."""

from __future__ import annotations

from procengine.liveness import MAX_MISSED, Liveness


def test_who_never_answers_is_late_once_and_then_starts_anew() -> None:
    liveness = Liveness()
    found = [liveness.begin_round([1]) for _ in range(2 * MAX_MISSED + 2)]
    assert [number for number, late in enumerate(found) if late == [1]] == [MAX_MISSED, 2 * MAX_MISSED + 1]


def test_an_answer_in_time_clears_only_who_gave_it() -> None:
    liveness = Liveness()
    for _ in range(MAX_MISSED):
        assert liveness.begin_round([1, 2]) == []
    liveness.take_answer(2)
    assert liveness.begin_round([1, 2]) == [1]
    assert liveness.begin_round([2]) == []


def test_who_is_not_asked_is_forgotten() -> None:
    liveness = Liveness()
    for _ in range(MAX_MISSED):
        liveness.begin_round([1])
    liveness.begin_round([])
    assert liveness.begin_round([1]) == []
