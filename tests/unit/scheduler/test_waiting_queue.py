"""Who is next, and who waits for another one's prefix."""

from __future__ import annotations

import numpy as np

from procengine.request import Request, RowSampling
from procengine.scheduler.waiting_queue import WaitingQueue


def request(key: int, priority: int = 0) -> Request:
    return Request(key, b"", str(key), np.array([1], np.int32), 5, RowSampling(0), priority=priority)


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for one in requests:
        queue.push(one)
    return queue


def order(queue: WaitingQueue) -> list[int]:
    keys = []
    while queue.peek() is not None:
        keys.append(queue.pop().key)
    return keys


def finish(queue: WaitingQueue, one: Request) -> None:
    one.is_finished = True
    queue.remove(one)


def test_smaller_priority_first_then_order_of_arrival() -> None:
    queue = queue_of(request(3), request(1, 5), request(2), request(0, 5), request(4, -1))
    assert len(queue) == 5
    assert order(queue) == [4, 2, 3, 0, 1]
    assert len(queue) == 0


def test_finished_request_is_passed_over_and_not_counted() -> None:
    requests = [request(key) for key in range(3)]
    queue = queue_of(*requests)
    finish(queue, requests[0])
    finish(queue, requests[2])
    assert len(queue) == 1
    assert order(queue) == [1]
    assert queue.peek() is None


def test_parked_request_lets_others_pass_and_comes_back_in_its_order() -> None:
    queue = queue_of(*(request(key) for key in range(4)))
    queue.begin_computing([b"x", b"y"])
    queue.park_next(b"y")
    queue.park_next(b"y")
    assert len(queue) == 4
    assert queue.pop().key == 2
    queue.end_computing([b"x"])
    assert queue.peek() is not None
    assert queue.pop().key == 3
    assert queue.peek() is None
    queue.end_computing([b"y"])
    assert order(queue) == [0, 1]
    assert len(queue) == 0


def test_parked_request_that_finished_does_not_come_back() -> None:
    parked = request(0)
    queue = queue_of(parked)
    queue.begin_computing([b"x"])
    queue.park_next(b"x")
    finish(queue, parked)
    assert len(queue) == 0
    queue.end_computing([b"x"])
    assert queue.peek() is None


def test_block_is_being_computed_until_it_is_published_or_given_up() -> None:
    queue = WaitingQueue()
    assert not queue.is_being_computed(b"x")
    queue.begin_computing([b"x"])
    queue.begin_computing([b"x"])
    assert queue.is_being_computed(b"x")
    queue.end_computing([b"x", b"never begun"])
    assert not queue.is_being_computed(b"x")
