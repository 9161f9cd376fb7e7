"""Handlers are called for what they watch, timers when they are due, and nobody else."""

from __future__ import annotations

import os
import time
from functools import partial

from procengine.poll_loop import PollLoop


def test_readable_descriptors_and_due_timers_are_called() -> None:
    loop, calls = PollLoop(), []
    reader, writer = os.pipe()
    try:
        loop.watch(reader, lambda: calls.append(os.read(reader, 10)))
        os.write(writer, b"x")
        loop.run_once()
        now_s = time.monotonic()
        loop.call_at(now_s + 0.02, lambda: calls.append(b"second"))
        loop.call_at(now_s + 0.01, lambda: calls.append(b"first"))
        cancelled = loop.call_at(now_s + 0.005, lambda: calls.append(b"never"))
        cancelled.cancel()
        while len(calls) < 3:
            loop.run_once()
        assert calls == [b"x", b"first", b"second"]
        assert time.monotonic() >= now_s + 0.02
    finally:
        os.close(reader)
        os.close(writer)


def test_one_handler_may_unwatch_another_that_is_ready_too() -> None:
    loop, calls = PollLoop(), []
    pipes = [os.pipe() for _ in range(2)]

    def take_turn(own: int, other: int) -> None:
        calls.append(own)
        loop.unwatch(other)

    try:
        for at, (reader, writer) in enumerate(pipes):
            os.write(writer, b"x")
            loop.watch(reader, partial(take_turn, reader, pipes[1 - at][0]))
        loop.run_once()
        assert len(calls) == 1
        loop.unwatch(99)  # never watched
    finally:
        for pipe in pipes:
            for fd in pipe:
                os.close(fd)


def test_timers_set_by_a_timer_are_kept() -> None:
    loop, calls = PollLoop(), []

    def set_another() -> None:
        loop.call_at(0.0, lambda: calls.append("inner"))

    loop.call_at(0.0, set_another)
    loop.run_once()
    assert calls == []
    loop.run_once()
    assert calls == ["inner"]
