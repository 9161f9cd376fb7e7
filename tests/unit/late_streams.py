"""A device that does nothing before it must: its streams are queues, run when somebody waits for what they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from procengine.device_streams import Event

__all__ = ["LateStreams"]

_Task = Callable[[], None]


@dataclass
class _Queue:
    """Tasks in order; a task may wait for another queue to get somewhere first."""

    tasks: deque[_Task] = field(default_factory=deque)
    num_told: int = 0
    num_done: int = 0

    def tell(self, task: _Task) -> _LateEvent:
        self.tasks.append(task)
        self.num_told += 1
        return _LateEvent(self, self.num_told)

    def run_until(self, count: int) -> None:
        while self.num_done < count:
            self.num_done += 1
            self.tasks.popleft()()


@dataclass(frozen=True)
class _LateEvent:
    queue: _Queue
    place: int

    def synchronize(self) -> None:
        self.queue.run_until(self.place)


class LateStreams:
    """With `eager_copies`, copies in do as much as they may at once: who overtakes shows what is not fenced."""

    def __init__(self, eager_copies: bool) -> None:
        self._eager = eager_copies
        self._compute, self._in, self._out = _Queue(), _Queue(), _Queue()

    def compute(self, task: _Task) -> None:
        """What a kernel would be."""
        self._compute.tell(task)

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def mark(self) -> Event:
        return self._compute.tell(lambda: None)

    def copy_in_order(self, source: Tensor, target: Tensor) -> None:
        self._compute.tell(lambda: _copy(source, target))

    def copy_in(self, source: Tensor, target: Tensor, after: Event | None) -> Event:
        if after is not None:
            self._in.tell(after.synchronize)
        copied = self._in.tell(lambda: _copy(source, target))
        if self._eager:
            copied.synchronize()
        self._compute.tell(copied.synchronize)
        return copied

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        self._out.tell(self.mark().synchronize)
        for pair in pairs:
            self._out.tell(partial(_copy, *pair))
        return self._out.tell(lambda: None)

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        raise AssertionError("not here")

    def finish(self) -> None:
        """Everything that was told."""
        for queue in (self._compute, self._in, self._out):
            queue.run_until(queue.num_told)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
