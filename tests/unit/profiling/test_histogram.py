"""Buckets and weighted percentiles."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from procengine.profiling.histogram import Histogram, percentiles


def test_a_bucket_holds_what_is_at_most_its_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe([0.0, 1.0, 1.5, 2.0, 2.5])
    assert histogram.counts.tolist() == [2, 2, 1]
    assert (histogram.count, histogram.sum) == (5, 7.0)
    histogram.observe([])
    assert histogram.count == 5


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5)), max_size=30))
def test_weights_count_like_repetitions(pairs: list[tuple[float, int]]) -> None:
    values = np.array([value for value, _ in pairs], np.float64)
    weights = np.array([weight for _, weight in pairs], np.int64)
    repeated = np.repeat(values, weights)
    weighted, plain = Histogram((1, 3, 9)), Histogram((1, 3, 9))
    weighted.observe(values, weights)
    plain.observe(repeated)
    assert weighted.counts.tolist() == plain.counts.tolist()
    assert np.isclose(weighted.sum, plain.sum)
    for wanted in (0, 50, 90, 99, 100):
        (found,) = percentiles(values, [wanted], weights)
        if repeated.size:
            assert found == np.percentile(repeated, wanted, method="lower")
        else:
            assert found is None


def test_percentiles_of_nothing() -> None:
    assert percentiles(np.zeros(0), [50, 99]) == [None, None]
