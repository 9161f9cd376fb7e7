"""`Window`: what a group did in the last seconds, as rates, percentiles and shares. Pure.

Owns: which records are recent, and the figures made of them. Never does: read a ring or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from procengine.profiling.bubbles import CAUSES, find_bubbles
from procengine.profiling.histogram import percentiles
from procengine.profiling.pass_totals import token_gaps
from procengine.profiling.records import RecordKind
from procengine.profiling.request_totals import COMPLETE, latencies
from procengine.profiling.requests import finished_requests
from procengine.profiling.snapshot import SpanTables
from procengine.profiling.steps import LOOP_STAGES, TEXT_STAGES, Passes, join_passes

__all__ = ["Percentiles", "Window", "WindowFigures", "WorkerShare"]

_WANTED: Final = (50, 90, 99)
_NO_REQUEST: Final = ("no request", "tokenize")  # nothing that could have run
_HOPS: Final = tuple(stage for stage in (*LOOP_STAGES, *TEXT_STAGES) if stage.process == "hop")


class Percentiles(Struct, frozen=True):
    """In milliseconds; None of nothing."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class WorkerShare(Struct, frozen=True):
    """How a worker spent the window, as shares of it; what is left it had no request.

    Attributes:
        busy: in passes.
        bubble: idle although there was a request to run.
        causes: the bubble by what was waited for, without those that took nothing.
    """

    rank: int
    busy: float
    bubble: float
    causes: dict[str, float]


class WindowFigures(Struct, frozen=True):
    """The last `seconds`. Rates are per second; latencies are of requests that ended in the window, by stop or length.

    Attributes:
        prompt_tokens: computed, so without those found in the cache.
        rows: a step, on average; None without steps.
        prefix_hit_rate: cached prompt tokens as a share of all, of the requests that ended; None without any.
        hops: by name.
    """

    seconds: float
    output_tokens: float
    prompt_tokens: float
    requests: float
    steps: float
    rows: float | None
    ttft_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    queue_ms: Percentiles
    prefix_hit_rate: float | None
    hops_ms: dict[str, Percentiles]
    workers: list[WorkerShare]


class Window:
    """The records of the last `length_s` seconds. Feed it all tables, oldest first."""

    def __init__(self, length_s: float) -> None:
        self._length_ns = round(1e9 * length_s)
        self._tables = SpanTables.of([])

    def add(self, tables: SpanTables, now_ns: int) -> None:
        """Take in what is new at `now_ns`; what is too old by then goes."""
        self._tables = self._tables.joined(tables).since(now_ns - self._length_ns)

    def figures(self, now_ns: int, num_workers: int, uptime_s: float | None = None) -> WindowFigures:
        """What the records say at `now_ns`. A group younger than the window (`uptime_s`) is measured over its life."""
        tables = self._tables.since(now_ns - self._length_ns)
        seconds = self._length_ns / 1e9
        if uptime_s is not None and 0 < uptime_s < seconds:
            seconds = uptime_s
        passes = join_passes(tables)
        steps, done = tables[RecordKind.STEP_SENT], tables[RecordKind.REQUEST_DONE]
        ended = finished_requests(tables)
        seconds_by_name = latencies(ended.where(np.isin(ended.counts["finish_code"], COMPLETE)))
        num_prompt_tokens = int(done["num_prompt_tokens"].sum())
        return WindowFigures(
            seconds=seconds,
            output_tokens=int(tables[RecordKind.RESULT_APPLIED]["num_tokens"].sum()) / seconds,
            prompt_tokens=int((steps["num_tokens"] - steps["num_decode_rows"]).sum()) / seconds,
            requests=len(done) / seconds,
            steps=len(steps) / seconds,
            rows=float(steps["num_rows"].mean()) if len(steps) else None,
            ttft_ms=_percentiles_ms(seconds_by_name["time_to_first_token"]),
            itl_ms=_percentiles_ms(*token_gaps(passes)),
            e2e_ms=_percentiles_ms(seconds_by_name["e2e"]),
            queue_ms=_percentiles_ms(seconds_by_name["queue"]),
            prefix_hit_rate=int(done["num_cached_tokens"].sum()) / num_prompt_tokens if num_prompt_tokens else None,
            hops_ms={stage.name: _percentiles_ms(passes.durations(stage) / 1e9) for stage in _HOPS},
            workers=_worker_shares(passes, tables, range(num_workers), seconds),
        )


def _percentiles_ms(values_s: NDArray[np.float64], weights: NDArray[np.int64] | None = None) -> Percentiles:
    return Percentiles(*percentiles(values_s * 1e3, _WANTED, weights))


def _worker_shares(passes: Passes, tables: SpanTables, ranks: Sequence[int], seconds: float) -> list[WorkerShare]:
    bubbles = find_bubbles(passes, tables)
    shares = []
    for rank in ranks:
        own = passes.of_rank(rank)
        busy_ns = int((own["done_ns"] - own["started_ns"]).sum())
        by_cause = bubbles.of_rank(rank).ns_by_cause
        causes = {cause: by_cause[cause] / 1e9 / seconds for cause in CAUSES if cause not in _NO_REQUEST}
        causes = {cause: share for cause, share in causes.items() if share > 0}
        shares.append(WorkerShare(rank, min(busy_ns / 1e9 / seconds, 1.0), sum(causes.values()), causes))
    return shares
