"""The tokens of requests that ended are kept for a while, within bounds."""

from __future__ import annotations

import numpy as np

from procengine.finished_histories import FinishedHistories


def test_newest_are_kept_up_to_so_many_tokens() -> None:
    histories = FinishedHistories(max_tokens=10)
    for key, count in enumerate((4, 4, 3, 10)):
        histories.add(key, np.full(count, key, np.int32))
        kept = histories.get(key)
        assert kept is not None and kept.tolist() == [key] * count
    assert [histories.get(key) is None for key in range(4)] == [True, True, True, False]


def test_one_that_is_too_long_is_not_kept() -> None:
    histories = FinishedHistories(max_tokens=3)
    histories.add(0, np.zeros(4, np.int32))
    assert histories.get(0) is None
    histories.add(1, np.zeros(3, np.int32))
    assert histories.get(1) is not None
