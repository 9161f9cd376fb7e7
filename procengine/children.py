"""`Children`: the processes of one group, as their supervisor holds them.

Owns: which there are, the pipe that they see close when we die, their span memory. Never does: decide that one is
started or ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import zmq

from procengine import ipc
from procengine.child_process import ChildProcess, child_name
from procengine.config import EngineConfig
from procengine.messages import FromSupervisor, encode
from procengine.profiling.span_ring import make_arena

__all__ = ["Children"]


class Children:
    """One process of each role and rank. `control` is the ROUTER that they connect to, `listen_fds` are by role."""

    def __init__(self, config: EngineConfig, control: zmq.Socket[bytes], listen_fds: Mapping[str, int]) -> None:
        self._config = config
        self._control = control
        self._listen_fds = listen_fds
        self._death_pipe = os.pipe()  # its write end is never written: children see it close
        self._children = [self._start(role, rank) for role, rank in _roles(config)]
        for role, rank in _serving_roles(config):
            child = ChildProcess(role, rank, 0, config, self._death_pipe[0], None, listen_fds.get(role))
            self._children.append(child)

    def __iter__(self) -> Iterator[ChildProcess]:
        return iter(self._children)

    def tell_successors(self, config: EngineConfig) -> None:
        """Those that are started from here on are given this configuration."""
        self._config = config

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {child.name: child.pid for child in self._children}

    @property
    def any_alive(self) -> bool:
        """Whether one still runs."""
        return any(child.is_alive for child in self._children)

    @property
    def all_ready(self) -> bool:
        """Whether each has said that it serves."""
        return all(child.is_ready for child in self._children)

    def find(self, role: str, rank: int = 0) -> ChildProcess | None:
        """The one that serves in this place now; None if there is no such place."""
        return next((child for child in self._children if (child.role, child.rank) == (role, rank)), None)

    def replace(self, dead: ChildProcess) -> ChildProcess:
        """Start the successor of one that has ended."""
        dead.close()
        fds = (self._death_pipe[0], dead.spans_fd, dead.listen_fd)
        child = ChildProcess(dead.role, dead.rank, dead.epoch + 1, self._config, *fds)
        self._children[self._children.index(dead)] = child
        return child

    def send(self, message: FromSupervisor, *roles: str) -> None:
        """Tell all of these roles, in this order."""
        for role in roles:
            for child in self._children:
                if child.role == role:
                    self.send_to(child, message)

    def send_to(self, child: ChildProcess, message: FromSupervisor) -> None:
        """Tell one. Who is dead, or has not come so far that it can hear, does not."""
        if child.is_alive:
            ipc.send_routed(self._control, child.identity, encode(message))

    def kill_all(self) -> None:
        """End them now."""
        for child in self._children:
            child.kill()

    def _start(self, role: str, rank: int) -> ChildProcess:
        """Memory for its spans is ours, so that it is there when the child is not."""
        spans_fd = make_arena(child_name(role, rank), self._config.profiling.span_records)
        return ChildProcess(role, rank, 0, self._config, self._death_pipe[0], spans_fd, self._listen_fds.get(role))


def _roles(config: EngineConfig) -> list[tuple[str, int]]:
    ranks = [("worker", rank) for rank in range(config.worker.num_workers)]
    return [*ranks, ("frontend", 0), ("output", 0)]  # workers first: they take longest


def _serving_roles(config: EngineConfig) -> list[tuple[str, int]]:
    """Those that speak HTTP, and keep no spans."""
    ranks = [("api", rank) for rank in range(config.api.num_workers)] if config.api.is_on else []
    return [("metrics", 0), *ranks] if config.metrics.is_on else ranks
