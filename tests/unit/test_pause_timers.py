"""One timer for a pause, and none without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from procengine.pipeline import Pipeline
from procengine.procs.pause_timers import PauseTimers

MS = 10**6


class Handle:
    def __init__(self, loop: FakeLoop) -> None:
        self._loop = loop

    def cancel(self) -> None:
        del self._loop.armed[self]


class FakeLoop:
    """Knows its timers, and calls them when it is told."""

    def __init__(self) -> None:
        self.armed: dict[Handle, tuple[float, Callable[[], None]]] = {}

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Handle:
        handle = Handle(self)
        self.armed[handle] = (delay_s, lambda: callback(*args))
        return handle

    @property
    def delays(self) -> list[float]:
        return [delay for delay, _ in self.armed.values()]

    def fire(self) -> None:
        handle, (_, callback) = next(iter(self.armed.items()))
        del self.armed[handle]
        callback()


class Owner:
    """Settles two pipelines whenever there may be something to plan, as `StepPump.pump` does."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.pipelines = [Pipeline(rank, dict, 2) for rank in range(2)]
        self.timers = PauseTimers(cast(asyncio.AbstractEventLoop, self.loop), self.pump)
        self.num_pumps = 0

    def pump(self) -> None:
        self.num_pumps += 1
        for pipeline in self.pipelines:
            self.timers.settle(pipeline)


def test_a_pause_has_one_timer_however_often_something_else_happens() -> None:
    owner = Owner()
    owner.pump()
    assert owner.loop.delays == []
    owner.pipelines[1].pause_ns = 10 * MS
    for _ in range(3):
        owner.pump()
    assert owner.loop.delays == [0.01]
    owner.loop.fire()
    assert (owner.pipelines[1].pause_ns, owner.num_pumps, owner.loop.delays) == (0, 5, [])


def test_a_pause_that_ends_by_itself_takes_its_timer_along() -> None:
    owner = Owner()
    for pipeline, ms in zip(owner.pipelines, (10, 20), strict=True):
        pipeline.pause_ns = ms * MS
    owner.pump()
    assert owner.loop.delays == [0.01, 0.02]
    owner.pipelines[0].end_pause()
    owner.pump()
    assert owner.loop.delays == [0.02]
    owner.pipelines[0].pause_ns = 4 * MS
    owner.pump()
    assert owner.loop.delays == [0.02, 0.004]
