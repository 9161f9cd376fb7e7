"""The finish rule that frontend and output share."""

from __future__ import annotations

import numpy as np
import pytest

from procengine.stopping import FINISH_REASON, LENGTH, NO_TOKEN, NOT_FINISHED, STOP, FinishLimits, check_finish

FIRST = np.zeros(1, np.intp)


def check(token: int, position: int, end_position: int, stops: tuple[int, ...], min_position: int = 0) -> int:
    limits = FinishLimits(
        np.array([end_position], np.int32),
        np.array([stops or (NO_TOKEN,)], np.int32),
        np.array([min_position], np.int32),
    )
    return int(check_finish(np.array([token], np.int32), np.array([position], np.int32), limits, FIRST)[0])


@pytest.mark.parametrize(
    ("token", "position", "end_position", "stops", "code"),
    [
        (5, 8, 10, (), NOT_FINISHED),
        (5, 9, 10, (), LENGTH),
        (5, 10, 10, (), LENGTH),  # a prompt that fills its limit yields one token
        (5, 8, 10, (5,), STOP),
        (5, 8, 10, (4, 5, NO_TOKEN, NO_TOKEN), STOP),
        (5, 8, 10, (4, 6), NOT_FINISHED),
        (5, 9, 10, (5,), STOP),  # both: the stop token counts
        (0, 0, 1, (), LENGTH),
        (0, 0, 2, (0,), STOP),
    ],
)
def test_one_row(token: int, position: int, end_position: int, stops: tuple[int, ...], code: int) -> None:
    assert check(token, position, end_position, stops) == code


@pytest.mark.parametrize(
    ("position", "end_position", "code"),
    [(5, 10, NOT_FINISHED), (6, 10, NOT_FINISHED), (7, 10, STOP), (6, 7, LENGTH), (7, 8, STOP)],
)
def test_stop_tokens_before_the_least_position_do_not_count_and_the_length_does(
    position: int, end_position: int, code: int
) -> None:
    assert check(5, position, end_position, (5,), min_position=7) == code


def test_rows_are_judged_each_by_its_own_limits() -> None:
    limits = FinishLimits(
        np.array([3, 9, 9, 3, 9], np.int32),
        np.array([[7, 8], [7, -1], [1, 2], [7, -1], [7, -1]], np.int32),
        np.array([0, 2, 0, 0, 3], np.int32),
    )
    token_ids, positions = np.array([1, 7, 7, 7, 7], np.int32), np.array([2, 2, 2, 2, 2], np.int32)
    codes = check_finish(token_ids, positions, limits, np.arange(5))
    assert codes.tolist() == [LENGTH, STOP, NOT_FINISHED, STOP, NOT_FINISHED]
    assert codes.dtype == np.int8
    rows = np.array([3, 0, 1])
    assert check_finish(token_ids[rows], positions[rows], limits, rows).tolist() == codes[rows].tolist()


def test_no_rows_no_codes() -> None:
    none = np.zeros(0, np.int32)
    assert (
        check_finish(none, none, FinishLimits(none, np.zeros((0, 4), np.int32), none), none.astype(np.intp)).size == 0
    )


def test_arguments_stay_as_they_are() -> None:
    token_ids, positions = np.array([7], np.int32), np.array([4], np.int32)
    limits = FinishLimits(np.array([5], np.int32), np.array([[7]], np.int32), np.array([6], np.int32))
    check_finish(token_ids, positions, limits, FIRST)
    assert (token_ids[0], positions[0], limits.end_positions[0], limits.stop_token_ids[0, 0]) == (7, 4, 5, 7)
    assert limits.min_positions[0] == 6


def test_finish_reasons_are_openai_words() -> None:
    assert {STOP: "stop", LENGTH: "length"} == FINISH_REASON
