"""A process that misses four rounds in a row hangs; one that answers any of them does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from procengine.children import Children
from procengine.liveness import LIVENESS_QUERY, MAX_MISSED, Liveness
from procengine.messages import Query


class FakeChildren(list[Any]):
    """Processes with these ids, and what they are sent."""

    def __init__(self, *pids: int) -> None:
        super().__init__(
            SimpleNamespace(pid=pid, identity=b"%d" % pid, is_ready=True, is_alive=True, num_asked=0) for pid in pids
        )

    def send_to(self, child: Any, message: Query) -> None:
        assert message == Query(LIVENESS_QUERY)
        child.num_asked += 1


def rounds(liveness: Liveness, count: int) -> list[list[int]]:
    return [[child.pid for child in liveness.begin_round()] for _ in range(count)]


def test_who_never_answers_is_late_and_then_starts_anew() -> None:
    liveness = Liveness(cast(Children, FakeChildren(1)))
    found = rounds(liveness, 2 * MAX_MISSED + 2)
    assert [number for number, late in enumerate(found) if late == [1]] == [MAX_MISSED, 2 * MAX_MISSED]


def test_an_answer_clears_only_who_gave_it() -> None:
    liveness = Liveness(cast(Children, FakeChildren(1, 2)))
    assert rounds(liveness, MAX_MISSED) == [[]] * MAX_MISSED
    liveness.take_answer(b"2")
    assert rounds(liveness, 1) == [[1]]
    for _ in range(3 * MAX_MISSED):
        liveness.take_answer(b"1")
        liveness.take_answer(b"2")
        assert rounds(liveness, 1) == [[]]


def test_who_starts_is_not_asked_and_who_has_died_is_forgotten() -> None:
    children = FakeChildren(1, 2)
    children[1].is_ready = False
    liveness = Liveness(cast(Children, children))
    assert rounds(liveness, MAX_MISSED) == [[]] * MAX_MISSED
    assert (children[0].num_asked, children[1].num_asked) == (MAX_MISSED, 0)
    children[0].is_alive = False
    assert rounds(liveness, 1) == [[]]
    children[0].is_alive = True
    assert rounds(liveness, MAX_MISSED) == [[]] * MAX_MISSED
