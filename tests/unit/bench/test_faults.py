"""From the arrivals of a stream to when it moved again, and what is said of figures that are too large."""

from __future__ import annotations

import numpy as np
import pytest

from procengine.bench.fault_streams import moved_ns
from procengine.bench.faults import FIGURES, missed, table


@pytest.mark.parametrize(
    ("arrivals", "since", "moved"),
    [
        ([0, 10, 20, 500, 510, 520], 25, 500),  # the pause began before
        ([0, 10, 20, 30, 500, 510], 25, 500),  # one more message was on its way
        ([0, 300, 310, 320, 400, 410], 305, 400),  # an earlier pause does not count
        ([0, 10, 20], 10, 20),
        ([5, 10, 90], 0, 90),  # none had come before
    ],
)
def test_a_stream_moves_again_at_the_end_of_its_longest_pause(arrivals: list[int], since: int, moved: int) -> None:
    assert moved_ns(np.array(arrivals), since) == moved


def figures(**medians: float) -> dict[str, object]:
    return {"num_runs": 3} | {f"{name}_ms": {"p50": value, "max": 2 * value} for name, value in medians.items()}


def test_medians_above_what_is_wanted_are_missed() -> None:
    found = figures(worker_noticed=99, survivor_serves=301, restart_in_place=99_999, sigterm_idle=5)
    assert missed(found) == ["survivor_serves"]
    lines = table(found).splitlines()
    assert [line.split()[0] for line in lines[3:]] == [
        "worker_noticed",
        "survivor_serves",
        "restart_in_place",
        "sigterm_idle",
    ]
    assert ["MISSED" in line for line in lines[3:]] == [False, True, False, False]
    assert all(wanted.meaning for wanted in FIGURES.values())
