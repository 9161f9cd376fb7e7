"""`GroupStatus`: asks every process of a group how it is, and answers whoever wanted to know.

Owns: the round of questions under way. Never does: watch a clock: its owner says when a round has taken too long.
"""

from __future__ import annotations

import os
import time

import zmq

from procengine import ipc
from procengine.child_process import ChildProcess, cpu_seconds, rss_bytes
from procengine.children import Children
from procengine.config import EngineConfig
from procengine.messages import ChildStats, ProcessStatus, Query, Status, encode

__all__ = ["GroupStatus"]

_ROLES = ("frontend", "output", "worker", "metrics")


class GroupStatus:
    """One round at a time: who asks while one is under way gets its answer."""

    def __init__(self, config: EngineConfig, children: Children, control: zmq.Socket[bytes], started_s: float) -> None:
        self._config = config
        self._children = children
        self._control = control
        self._started_s = started_s
        self._query_id = 0
        self._askers: list[bytes] = []
        self._stats_by_identity: dict[bytes, ChildStats] = {}

    @property
    def is_asking(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._askers)

    def ask(self, asker: bytes) -> None:
        """Somebody wants to know; if nobody did before, the children are asked."""
        self._askers.append(asker)
        if len(self._askers) == 1:
            self._query_id += 1
            self._stats_by_identity.clear()
            self._children.send(Query(self._query_id), *_ROLES)

    def take(self, identity: bytes, stats: ChildStats) -> bool:
        """A child has answered. Whether all that live have."""
        if stats.query_id != self._query_id or not self._askers:
            return False
        self._stats_by_identity[identity] = stats
        return len(self._stats_by_identity) == sum(child.is_alive for child in self._children)

    def answer(self, state: str) -> None:
        """Tell all who asked what is known by now; the group itself is in `state`."""
        own = ProcessStatus("supervisor", 0, os.getpid(), state, *_resources(os.getpid(), self._started_s), 0)
        processes = [own, *map(self._status_of, self._children)]
        data = encode(Status(self._config.group.name, self._config.model.name, processes))
        askers, self._askers = self._askers, []
        for asker in askers:
            ipc.send_routed(self._control, asker, data)

    def _status_of(self, child: ChildProcess) -> ProcessStatus:
        stats = self._stats_by_identity.get(child.identity)
        state = stats.state if stats else "silent" if child.is_alive else "dead"
        depth = stats.queue_depth if stats else 0
        resources = _resources(child.pid, child.started_s)
        return ProcessStatus(child.role, child.rank, child.pid, state, *resources, depth, num_restarts=child.epoch)


def _resources(pid: int, started_s: float) -> tuple[float, int, float]:
    return time.monotonic() - started_s, rss_bytes(pid), cpu_seconds(pid)
