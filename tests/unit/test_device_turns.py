"""Workflows that all have work get the same time of the device, whatever their steps take."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procengine.device_turns import DeviceTurns

COSTS = st.lists(st.integers(1, 1000), min_size=40, max_size=80)


def run(turns: DeviceTurns, costs: dict[str, deque[int]], depth: int) -> tuple[list[str], dict[str, int]]:
    """Serve until the first workflow has no steps left, `depth` in flight: who was served, and the time of each."""
    under_way: deque[tuple[str, int, int]] = deque()
    served: list[str] = []
    used = dict.fromkeys(costs, 0)
    while all(costs.values()):
        name = turns.order(costs)[0]
        under_way.append((name, turns.serve(name), costs[name].popleft()))
        served.append(name)
        if len(under_way) == depth:
            ended, charged_ns, busy_ns = under_way.popleft()
            turns.settle(ended, charged_ns, busy_ns)
            used[ended] += busy_ns
    return served, used


@given(first=COSTS, second=COSTS, depth=st.integers(1, 3))
def test_two_that_have_work_differ_by_no_more_than_what_is_in_flight(
    first: list[int], second: list[int], depth: int
) -> None:
    most = max(first) + max(second)
    _, used = run(DeviceTurns(), {"a": deque(first), "b": deque(second)}, depth)
    assert abs(used["a"] - used["b"]) <= (depth + 1) * most


def test_short_steps_come_as_often_as_makes_up_for_long_ones() -> None:
    turns = DeviceTurns()
    served, used = run(turns, {"generate": deque([20] * 400), "embed": deque([200] * 400)}, 1)
    assert used["generate"] == pytest.approx(used["embed"], abs=220)
    longest = max(map(len, "".join(name[0] for name in served).split("g")))
    assert longest == 1, "two long steps never follow each other"


def test_steps_of_unknown_length_alternate() -> None:
    turns = DeviceTurns()
    served = []
    for _ in range(6):
        served.append(turns.order("ab")[0])
        turns.serve(served[-1])
    assert served == ["a", "b", "a", "b", "a", "b"]


def test_who_was_idle_gets_no_credit_for_it() -> None:
    turns = DeviceTurns()
    turns.order("ab")
    for _ in range(100):
        turns.settle("a", turns.serve("a"), 10)
    served, _ = run(turns, {"a": deque([10] * 20), "b": deque([10] * 20)}, 1)
    assert served[:2] == ["b", "a"] or served[:3] == ["b", "b", "a"]


def test_a_newcomer_shares_with_those_who_were_there_before() -> None:
    """It is next, and takes the device no longer than its share, however much they have used."""
    turns = DeviceTurns()
    for _ in range(100):
        assert turns.order("a") == ["a"]
        turns.settle("a", turns.serve("a"), 10)
    served, _ = run(turns, {"a": deque([10] * 20), "b": deque([10] * 20)}, 1)
    assert served[0] == "b"
    assert [served[:20].count(name) for name in "ab"] == pytest.approx([10, 10], abs=1)


def test_one_workflow_is_always_next() -> None:
    turns = DeviceTurns()
    assert turns.order(["generate"]) == ["generate"]
    turns.settle("generate", turns.serve("generate"), 5)
    assert turns.order(["generate"]) == ["generate"]
