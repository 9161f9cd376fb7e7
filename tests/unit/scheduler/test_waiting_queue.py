"""Who is next."""

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


def test_tokens_that_wait_are_those_of_requests_that_have_not_ended() -> None:
    requests = [request(key) for key in range(3)]
    queue = queue_of(*requests)
    assert queue.holds_tokens(3) and not queue.holds_tokens(4)
    finish(queue, requests[1])
    assert queue.holds_tokens(2) and not queue.holds_tokens(3)
    assert queue_of().holds_tokens(0) and not queue_of().holds_tokens(1)
