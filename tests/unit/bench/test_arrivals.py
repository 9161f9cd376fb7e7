"""Arrival times: their distribution, and that they are the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from procengine.bench.arrivals import arrival_times


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(rate: float, burstiness: float) -> None:
    gaps = np.diff(arrival_times(50_000, rate, burstiness, seed=3))
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


def test_poisson_gaps_are_exponential() -> None:
    """Kolmogorov-Smirnov distance to the exponential distribution, far below the 1 % critical value 1.63 / sqrt(n)."""
    gaps = np.sort(np.diff(arrival_times(20_001, 10.0, 1.0, seed=0)))
    expected = 1 - np.exp(-10.0 * gaps)
    assert np.abs(np.arange(1, gaps.size + 1) / gaps.size - expected).max() < 1.63 / np.sqrt(gaps.size)


def test_times_begin_at_zero_and_ascend_and_follow_the_seed() -> None:
    times = arrival_times(100, 5.0, 1.0, seed=1)
    assert times.shape == (100,) and times[0] == 0 and (np.diff(times) >= 0).all()
    assert (times == arrival_times(100, 5.0, 1.0, seed=1)).all()
    assert (times[1:] != arrival_times(100, 5.0, 1.0, seed=2)[1:]).all()


def test_few_requests() -> None:
    assert arrival_times(0, 1.0, 1.0, seed=0).tolist() == []
    assert arrival_times(1, 1.0, 1.0, seed=0).tolist() == [0.0]
