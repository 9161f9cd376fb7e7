"""`HungChildren`: ends the processes of a group that hang: what follows is a death like any other.

Owns: the rounds of questions, and the pause between the question where a process hangs and its end. Never does: decide
what a death means.
"""

from __future__ import annotations

import time

from procengine.child_process import ChildProcess, write_log
from procengine.children import Children
from procengine.liveness import MAX_MISSED, Liveness
from procengine.poll_loop import PollLoop

__all__ = ["HungChildren"]

_DUMP_S = 0.5  # for a hung child to write its stacks


class HungChildren:
    """A process hangs after `timeout_s` without an answer, a worker also without a result that it owes."""

    def __init__(self, children: Children, loop: PollLoop, timeout_s: float) -> None:
        self._children = children
        self._loop = loop
        self._timeout_s = timeout_s
        self._liveness = Liveness(children)
        self._is_watching = False

    def watch(self) -> None:
        """Ask who lives, from here on until `stop`."""
        self._is_watching = True
        self._ask()

    def stop(self) -> None:
        """Whoever is slow now is slow to end."""
        self._is_watching = False

    def take_answer(self, identity: bytes) -> None:
        """The process with this control socket lives."""
        self._liveness.take_answer(identity)

    def end_worker(self, rank: int, epoch: int) -> None:
        """The frontend has waited for a result of this worker for too long, whatever it answers."""
        child = self._children.find("worker", rank)
        if child is not None and child.epoch == epoch and child.is_alive:
            self._end(child, "has made no progress")

    def _ask(self) -> None:
        if not self._is_watching:
            return
        for child in self._liveness.begin_round():
            self._end(child, "has not answered")
        self._loop.call_at(time.monotonic() + self._timeout_s / MAX_MISSED, self._ask)

    def _end(self, child: ChildProcess, why: str) -> None:
        """It is asked where it hangs, and then killed."""
        write_log(f"procengine: {child.name} (pid {child.pid}) {why} for {self._timeout_s:g} s; its threads:\n")
        child.dump_stacks()
        self._loop.call_at(time.monotonic() + _DUMP_S, child.kill)  # whoever watches its pidfd hears of it
