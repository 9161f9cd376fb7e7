"""`Frame`: all that `procengine top` and the web page show of a group at one moment. Pure.

Owns: which figures these are. Never does: read, ask, or draw.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from procengine.groups import GroupInfo
from procengine.profiling.group_totals import GroupTotals
from procengine.profiling.metric_families import used_share
from procengine.profiling.process_watch import ProcessFigures
from procengine.profiling.window import Window, WindowFigures

__all__ = ["Frame", "ProcessLine", "WorkerLoad", "make_frame"]


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
    """Everything that is shown."""

    group: str
    model: str
    uptime_s: float
    window: WindowFigures
    workers: list[WorkerLoad]
    processes: list[ProcessLine]
    totals: dict[str, Any]
    num_lost_records: int


def make_frame(info: GroupInfo, totals: GroupTotals, window: Window, now_ns: int) -> Frame:
    """The group at `now_ns`, of what its counters and its window have seen by then."""
    processes = [_line(figures, now_ns) for figures in totals.watch.processes]
    uptime_s = processes[0].uptime_s if processes else None
    loads = totals.gauges
    per_worker = info.num_blocks // max(len(loads), 1)
    return Frame(
        group=info.name,
        model=info.model,
        uptime_s=uptime_s or 0.0,
        window=window.figures(now_ns, len(loads), uptime_s),
        workers=[
            WorkerLoad(
                rank, gauges.num_running, gauges.num_waiting, gauges.num_in_flight, used_share(gauges, per_worker)
            )
            for rank, gauges in enumerate(loads)
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
