"""What is due when, and how little that costs when most of it ends before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from procengine.deadlines import DeadlineQueue


def queue_of(*deadlines: int, over: set[int] | None = None) -> DeadlineQueue[int]:
    """Items are numbered as they were added."""
    ended = set() if over is None else over
    queue = DeadlineQueue[int](lambda item: item in ended)
    for item, deadline_ns in enumerate(deadlines):
        queue.add(deadline_ns, item)
    return queue


def test_an_empty_queue_has_no_deadline() -> None:
    queue = queue_of()
    assert queue.next_ns() is None
    assert queue.take_due(10**18) == []


def test_items_come_as_their_time_comes_equal_ones_in_order() -> None:
    queue = queue_of(30, 10, 20, 10)
    assert queue.next_ns() == 10
    assert queue.take_due(9) == []
    assert queue.take_due(10) == [1, 3]
    assert queue.next_ns() == 20
    assert queue.take_due(100) == [2, 0]
    assert queue.next_ns() is None


def test_what_is_over_is_neither_due_nor_waited_for() -> None:
    over: set[int] = set()
    queue = queue_of(10, 20, 30, over=over)
    over |= {0, 1}
    assert queue.next_ns() == 30
    over.add(2)
    assert queue.next_ns() is None
    assert queue.take_due(100) == []


def test_ended_items_behind_a_late_deadline_do_not_pile_up() -> None:
    over: set[int] = set()
    queue = queue_of(over=over)
    queue.add(1, -1)  # never over: nothing is popped before it
    for item in range(100_000):
        queue.add(2 + item, item)
        over.add(item)
        assert len(queue) <= 130


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=200), st.integers(0, 60))
def test_it_gives_what_sorting_would(entries: list[tuple[int, bool]], now: int) -> None:
    over = {item for item, (_, is_over) in enumerate(entries) if is_over}
    queue = queue_of(*(deadline for deadline, _ in entries), over=over)
    alive = sorted((deadline, item) for item, (deadline, is_over) in enumerate(entries) if not is_over)
    assert queue.take_due(now) == [item for deadline, item in alive if deadline <= now]
    assert queue.next_ns() == next((deadline for deadline, _ in alive if deadline > now), None)
