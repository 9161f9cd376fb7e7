"""`Restarts`: which children of a group are started again, how soon, who asked for it, and who hears of it.

Owns: the memory of deaths, and the restarts that somebody asked for. Never does: start a process, or watch a clock.

A restart that was asked for loses nothing: a worker gives up its requests between two steps, the output process passes
on what it has, the frontend first finishes what runs. It counts as no death.
"""

from __future__ import annotations

import zmq

from procengine import ipc
from procengine.child_process import ChildProcess
from procengine.children import Children
from procengine.config import GroupConfig
from procengine.messages import (
    FrontendLost,
    Leave,
    OutputLost,
    Restarted,
    RetireWorker,
    Shutdown,
    WorkerLost,
    encode,
)
from procengine.profiling.span_ring import NOBODY, take_noted_key
from procengine.restart_policy import RestartPolicy

__all__ = ["Restarts"]


class Restarts:
    """Of one group. `control` is the ROUTER that answers go out of."""

    def __init__(self, config: GroupConfig, children: Children, control: zmq.Socket[bytes]) -> None:
        self._config = config
        self._children = children
        self._control = control
        self._policies: dict[str, RestartPolicy] = {}
        self._askers_by_name: dict[str, list[bytes]] = {}

    def delay_s(self, child: ChildProcess, now_s: float) -> float | None:
        """It has died: how long to wait before its successor is started; None: it has died too often."""
        limits = self._config.max_restarts, self._config.restart_window_s
        return self._policies.setdefault(child.name, RestartPolicy(*limits)).delay_s(now_s)

    def describe_last(self, child: ChildProcess) -> str:
        """How one that has died too often ended."""
        policy, end = self._policies[child.name], child.describe_end()
        if not policy.max_restarts:
            return end
        limit = f"{policy.num_recent} times within {policy.window_s:g} s (max_restarts is {policy.max_restarts})"
        return f"{child.name} died {limit}; the last time: {end}"

    def ask(self, asker: bytes, name: str, timeout_s: float | None) -> None:
        """Somebody wants a child restarted, and waits for an answer."""
        child = next((child for child in self._children if child.name == name), None)
        if child is None:
            known = ", ".join(child.name for child in self._children)
            self._answer(asker, Restarted(name, 0, f"process: {name!r} is none of this group's, which are: {known}"))
        elif not child.is_ready or not child.is_alive:
            self._answer(asker, Restarted(name, 0, f"{name} is being started as it is"))
        else:
            askers = self._askers_by_name.setdefault(name, [])
            askers.append(asker)
            if len(askers) == 1:
                self._begin(child, self._config.drain_timeout_s if timeout_s is None else timeout_s)

    def _begin(self, child: ChildProcess, timeout_s: float) -> None:
        if child.role == "worker":
            self._children.send(RetireWorker(child.rank, child.epoch), "frontend")
        elif child.role == "metrics":
            self._children.send_to(child, Shutdown())
        else:
            self._children.send_to(child, Leave(timeout_s))

    def end_worker(self, rank: int, epoch: int) -> None:
        """No step will be sent to this worker any more."""
        child = self._children.find("worker", rank)
        if child is not None and child.epoch == epoch and child.name in self._askers_by_name:
            self._children.send_to(child, Shutdown())

    def is_planned(self, child: ChildProcess) -> bool:
        """Whether it has ended because it was asked to."""
        return child.name in self._askers_by_name and child.has_ended_well

    def tell_loss(self, child: ChildProcess, end: str) -> None:
        """Those whom it concerns hear that it has ended, and how."""
        if child.role == "frontend":
            self._children.send(FrontendLost(child.epoch, end), "output")
        elif child.role == "output":
            key = NOBODY if child.spans_fd is None else take_noted_key(child.spans_fd)
            self._children.send(OutputLost(child.epoch, key), "frontend")
        elif child.role == "worker":
            self._children.send(WorkerLost(child.rank, child.epoch), "frontend")

    def tell_news(self, child: ChildProcess) -> None:
        """One that is ready now hears what was said while it was not there. To hear it twice does no harm."""
        frontend = self._children.find("frontend")
        if child is frontend:
            for other in self._children:
                if other.epoch and other.role in ("worker", "output"):
                    self._children.send_to(child, _loss_of(other, other.epoch - 1))
                if other.role == "worker" and other.name in self._askers_by_name:
                    self._children.send_to(child, RetireWorker(other.rank, other.epoch))
        elif child.role == "output" and frontend is not None and frontend.epoch:
            self._children.send_to(child, FrontendLost(frontend.epoch - 1, "the frontend died"))

    def finish(self, child: ChildProcess) -> None:
        """A successor is ready."""
        self._answer_all(Restarted(child.name, child.pid))

    def refuse(self, name: str, reason: str) -> None:
        """It stays as it is."""
        self._answer_all(Restarted(name, 0, reason))

    def refuse_all(self, reason: str) -> None:
        """Nothing is restarted any more."""
        for name in list(self._askers_by_name):
            self.refuse(name, reason)

    def _answer_all(self, answer: Restarted) -> None:
        for asker in self._askers_by_name.pop(answer.process, []):
            self._answer(asker, answer)

    def _answer(self, asker: bytes, answer: Restarted) -> None:
        ipc.send_routed(self._control, asker, encode(answer))


def _loss_of(child: ChildProcess, epoch: int) -> WorkerLost | OutputLost:
    """What the frontend is told of the end of such a child, of that epoch."""
    return WorkerLost(child.rank, epoch) if child.role == "worker" else OutputLost(epoch)
