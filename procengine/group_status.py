"""`GroupStatus`: asks every process of a group how it is, and answers whoever wanted to know.

Owns: the round of questions under way, and when it has taken too long. Never does: know the group's state; it asks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import zmq

from procengine import ipc
from procengine.child_process import ChildProcess, cpu_seconds, rss_bytes
from procengine.children import Children
from procengine.config import EngineConfig
from procengine.messages import ChildStats, ProcessStatus, Query, Status, encode
from procengine.poll_loop import PollLoop, Timer

__all__ = ["GroupStatus"]

_STUCK_SHARE = 0.1  # of the time after which a worker is taken for hung: by then, somebody may want to know
_WAIT_S = 1.0  # for the children; then what is known is told
_ROLES = ("frontend", "output", "worker", "metrics", "api")


class GroupStatus:
    """One round at a time: who asks while one is under way gets its answer."""

    def __init__(
        self,
        config: EngineConfig,
        children: Children,
        control: zmq.Socket[bytes],
        loop: PollLoop,
        state: Callable[[], str],
        started_s: float,
    ) -> None:
        self._loop = loop
        self._state = state
        self._timer = Timer(0.0, self._answer)
        self._config = config
        self._children = children
        self._control = control
        self._started_s = started_s
        self._query_id = 0
        self._askers: list[bytes] = []
        self._stats_by_identity: dict[bytes, ChildStats] = {}

    @property
    def _frontend_stats(self) -> ChildStats | None:
        frontend = self._children.find("frontend")
        return self._stats_by_identity.get(frontend.identity) if frontend else None

    def ask(self, asker: bytes) -> None:
        """Somebody wants to know; if nobody did before, the children are asked."""
        self._askers.append(asker)
        if len(self._askers) == 1:
            self._query_id += 1
            self._stats_by_identity.clear()
            self._timer = self._loop.call_at(time.monotonic() + _WAIT_S, self._answer)
            self._children.send(Query(self._query_id), *_ROLES)

    def take(self, identity: bytes, stats: ChildStats) -> None:
        """A child has answered. When all have of which an answer can be expected, whoever asked gets his."""
        if stats.query_id != self._query_id or not self._askers:
            return
        self._stats_by_identity[identity] = stats
        expected = {child.identity for child in self._children if child.is_alive and child.is_ready}
        if expected <= self._stats_by_identity.keys():
            self._answer()

    def _answer(self) -> None:
        """Tell all who asked what is known by now."""
        self._timer.cancel()
        state = self._state()
        resources = _resources(os.getpid(), self._started_s)
        own = ProcessStatus("supervisor", 0, os.getpid(), state, *resources, 0, ready=state == "ready")
        processes = [own, *map(self._status_of, self._children)]
        data = encode(Status(self._config.group.name, self._config.model.name, processes))
        askers, self._askers = self._askers, []
        for asker in askers:
            ipc.send_routed(self._control, asker, data)

    def _status_of(self, child: ChildProcess) -> ProcessStatus:
        stats = self._stats_by_identity.get(child.identity)
        waits_s = self._frontend_stats.waits_s if self._frontend_stats else ()
        waited_s = waits_s[child.rank] if child.role == "worker" and child.rank < len(waits_s) else 0.0
        is_stuck = waited_s > self._config.group.step_timeout_s * _STUCK_SHARE
        is_live = child.is_alive and (stats is not None or not child.is_ready)
        return ProcessStatus(
            child.role,
            child.rank,
            child.pid,
            _state_of(child, stats, waited_s if is_stuck else 0.0),
            *_resources(child.pid, child.started_s),
            stats.queue_depth if stats else 0,
            num_restarts=child.epoch,
            live=is_live,
            ready=child.is_ready and stats is not None and stats.state == "ready",
            progressing=is_live and not is_stuck,
            waited_s=round(waited_s, 3),
        )


def _state_of(child: ChildProcess, stats: ChildStats | None, stuck_s: float) -> str:
    if not child.is_alive:
        return "dead"
    if not child.is_ready:
        return "starting"
    if stats is None:
        return "silent"
    return f"stuck {stuck_s:.0f} s" if stuck_s else stats.state


def _resources(pid: int, started_s: float) -> tuple[float, int, float]:
    return time.monotonic() - started_s, rss_bytes(pid), cpu_seconds(pid)
