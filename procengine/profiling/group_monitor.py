"""`GroupMonitor`: one running group as `procengine top` sees it, from outside.

Owns: the reader of its spans and the socket to its supervisor. Never does: compute (`Window`, `GroupTotals`), or draw.
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from msgspec import Struct

from procengine import ipc
from procengine.groups import GroupInfo, is_gone
from procengine.messages import GetStatus, decode_status, encode
from procengine.profiling.group_totals import GroupTotals
from procengine.profiling.metric_families import used_share
from procengine.profiling.process_watch import ProcessFigures
from procengine.profiling.snapshot import SpanReader
from procengine.profiling.window import Window, WindowFigures

__all__ = ["Frame", "GroupMonitor", "ProcessLine", "WorkerLoad"]


class WorkerLoad(Struct, frozen=True):
    """A worker's load now; `kv_usage` is a share, 0 to 1."""

    rank: int
    num_running: int
    num_waiting: int
    num_steps_in_flight: int
    kv_usage: float


class ProcessLine(Struct, frozen=True):
    """A process now; `cpu_share` is in cores (1.0 is one), None before it was looked at twice."""

    name: str
    pid: int
    state: str
    cpu_share: float | None
    rss_bytes: int
    uptime_s: float
    queue_depth: int
    num_restarts: int
    heartbeat_age_s: float | None


class Frame(Struct, frozen=True):
    """Everything that `procengine top` shows."""

    group: str
    model: str
    uptime_s: float
    window: WindowFigures
    workers: list[WorkerLoad]
    processes: list[ProcessLine]
    totals: dict[str, Any]
    num_lost_records: int


class GroupMonitor:
    """Watches one group until it is gone. `window_s`: how far back figures go."""

    def __init__(self, info: GroupInfo, window_s: float) -> None:
        self.info = info
        self._num_workers = sum(name.startswith("worker-") for name in info.pids)
        self._reader = SpanReader(info.pids["supervisor"])
        self._window = Window(window_s)
        self._totals = GroupTotals(self._num_workers)
        self._context = ipc.make_context()
        self.status_socket = ipc.connect(self._context, zmq.DEALER, info.control)
        self._status_ns = 0
        self._is_asked = False

    @property
    def is_gone(self) -> bool:
        """Whether the group has ended, or another one has taken its place."""
        return is_gone(self.info)

    @property
    def has_status(self) -> bool:
        """Whether the supervisor has answered once."""
        return bool(self._status_ns)

    def ask(self) -> None:
        """Ask the supervisor how its processes are, unless it still owes an answer."""
        if not self._is_asked:
            self.status_socket.send(encode(GetStatus()))
            self._is_asked = True

    def take_status(self) -> None:
        """Take in the answer, which is there (`status_socket` is readable)."""
        self._is_asked = False
        self._status_ns = time.monotonic_ns()
        self._totals.add_status(decode_status(self.status_socket.recv()), self._status_ns)

    def read(self) -> None:
        """Take in what is new in the rings.

        Raises:
            OSError: the group is gone, or belongs to another user.
        """
        tables = self._reader.read()
        self._totals.add_tables(tables)
        self._window.add(tables, time.monotonic_ns())

    def frame(self) -> Frame:
        """What there is to see now."""
        now_ns = time.monotonic_ns()
        totals = self._totals
        processes = [_line(figures, now_ns) for figures in totals.watch.processes]
        uptime_s = processes[0].uptime_s if processes else None
        per_worker = self.info.num_blocks // max(self._num_workers, 1)
        return Frame(
            group=self.info.name,
            model=self.info.model,
            uptime_s=uptime_s or 0.0,
            window=self._window.figures(now_ns, self._num_workers, uptime_s),
            workers=[
                WorkerLoad(
                    rank,
                    gauges.num_running,
                    gauges.num_waiting,
                    gauges.num_in_flight,
                    used_share(gauges, per_worker),
                )
                for rank, gauges in enumerate(totals.gauges)
            ],
            processes=processes,
            totals={
                "prompt_tokens": totals.ledger.num_prompt_tokens,
                "cached_tokens": totals.ledger.num_cached_tokens,
                "output_tokens": totals.requests.num_output_tokens,
                "requests": dict(totals.requests.num_by_reason),
                "preemptions": totals.ledger.num_preemptions,
                "since_start": totals.ledger.is_complete,
            },
            num_lost_records=totals.num_lost,
        )

    def close(self) -> None:
        """Let go of the group."""
        self._context.destroy(linger=0)


def _line(figures: ProcessFigures, now_ns: int) -> ProcessLine:
    status = figures.status
    return ProcessLine(
        figures.name,
        status.pid,
        status.state,
        figures.cpu_share,
        status.rss_bytes,
        status.uptime_s,
        status.queue_depth,
        status.num_restarts,
        (now_ns - figures.heard_ns) / 1e9 if figures.heard_ns else None,
    )
