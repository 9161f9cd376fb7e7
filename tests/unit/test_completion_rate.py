"""How fast requests end, and what a client that was refused is told of it."""

from __future__ import annotations

import pytest

from procengine.completion_rate import CompletionRate

S = 10**9


def rate_of(per_second: int, seconds: int) -> CompletionRate:
    rate = CompletionRate(0)
    for tick in range(seconds * 10):
        rate.add(per_second // 10, tick * S // 10)
    return rate


@pytest.mark.parametrize("seconds", [1, 5, 100])
@pytest.mark.parametrize("per_second", [10, 1000])
def test_a_steady_rate_is_measured_from_the_first_second_on(per_second: int, seconds: int) -> None:
    assert rate_of(per_second, seconds).per_second(seconds * S) == pytest.approx(per_second, rel=0.1)


def test_the_hint_is_the_time_that_so_many_take() -> None:
    rate = rate_of(20, 60)
    assert rate.seconds_for(10, 60 * S) == pytest.approx(0.5, rel=0.1)
    assert rate.seconds_for(200, 60 * S) == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(("count", "hint"), [(0.001, 0.1), (10**9, 60.0)])
def test_the_hint_has_bounds(count: float, hint: float) -> None:
    assert rate_of(20, 10).seconds_for(count, 10 * S) == hint


def test_nothing_measured_is_a_second_and_long_silence_a_minute() -> None:
    assert CompletionRate(0).seconds_for(5, 100 * S) == 1.0
    assert rate_of(20, 10).seconds_for(5, 1000 * S) == 60.0
