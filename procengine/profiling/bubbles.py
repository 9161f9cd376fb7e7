"""Bubbles: the time in which a worker had nothing to run, divided by what it was waiting for. Pure.

Owns: the causes, and the rules that divide a gap among them. Never does: read a ring.

A gap lies between the end of a pass and the start of the next one on the same worker. What had to happen before the
next pass could start is a chain: a result comes back, is applied, a step is planned, built, sent, received, taken up.
The gap is laid over that chain, and each part of it counts for the link that was going on. Whatever of the chain was
over before the gap began was overlapped with the pass before, and cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from procengine.profiling.records import RecordKind
from procengine.profiling.snapshot import SpanTables
from procengine.profiling.steps import Passes

__all__ = ["CAUSES", "CAUSE_HELP", "Bubbles", "busy_until", "find_bubbles", "overlap_share"]

Int64s = NDArray[np.int64]

CAUSE_HELP: Final[dict[str, str]] = {
    "no request": "there was nothing to run: no request was accepted or on its way through the tokenizer",
    "tokenize": "the only requests were being tokenized (or their grammar compiled)",
    "result hop": "the result of an earlier pass was on its way back to the frontend",
    "decode+apply": "the frontend took that result in",
    "frontend busy": "the frontend did something else: admission, clients, other workers, or had no CPU",
    "schedule": "the frontend decided what to run",
    "build": "the frontend laid out the step's arrays",
    "encode+send": "the frontend encoded the step and gave it to the socket",
    "step hop": "the step was on its way to the worker",
    "worker queue": "the step was at the worker: decoded, and the device loop woken",
}
CAUSES: Final = tuple(CAUSE_HELP)


@dataclass(frozen=True, slots=True)
class Bubbles:
    """The gaps of all workers, by worker and time.

    Attributes:
        next_pass: int64 [n], row of the pass that each gap ended with, in the `Passes` they were found in.
        ranks: int64 [n].
        began_ns: int64 [n], when the pass before was done.
        parts_ns: int64 [n, causes]: the parts of each gap in the order of `CAUSES`, which is the order in time; a row
            adds up to the gap.
    """

    next_pass: Int64s
    ranks: Int64s
    began_ns: Int64s
    parts_ns: Int64s

    def __len__(self) -> int:
        return len(self.next_pass)

    @property
    def durations_ns(self) -> Int64s:
        """int64 [n]."""
        return np.asarray(self.parts_ns.sum(axis=1), np.int64)

    @property
    def ns_by_cause(self) -> dict[str, int]:
        """Idle time by what was waited for, all gaps together."""
        return dict(zip(CAUSES, self.parts_ns.sum(axis=0).tolist(), strict=True))

    def of_rank(self, rank: int) -> Bubbles:
        """Those of one worker."""
        is_own = self.ranks == rank
        return Bubbles(self.next_pass[is_own], self.ranks[is_own], self.began_ns[is_own], self.parts_ns[is_own])


def find_bubbles(passes: Passes, tables: SpanTables) -> Bubbles:
    """Every gap between two passes of which none is missing in between. Gaps of no length are among them."""
    nexts = np.flatnonzero(passes.follows)
    began, ended = passes["done_ns"][nexts - 1], passes["started_ns"][nexts]
    links = _chain(passes, nexts, tables)
    is_later_pass = passes["micro_step"][nexts] > 0  # within a step there is nothing to wait for but the worker itself
    links[is_later_pass] = 0
    bounds = np.concatenate((began[:, None], links, ended[:, None]), axis=1)
    bounds = np.minimum(np.maximum.accumulate(bounds, axis=1), ended[:, None])
    return Bubbles(nexts, passes["rank"][nexts], began, np.diff(bounds, axis=1))


def _chain(passes: Passes, nexts: Int64s, tables: SpanTables) -> Int64s:
    """When each link but the last was over, int64 [n, causes - 1]; 0 for a link that there was not."""
    received, prepared = _first_admitted(passes, nexts, tables)
    result_received, applied = _result_before(passes, nexts)
    # The later of the two let the frontend plan: a request that found nothing running, or a result.
    is_fresh = prepared > applied
    return np.stack(
        (
            np.where(is_fresh, received, 0),
            np.where(is_fresh, prepared, 0),
            np.where(is_fresh, 0, result_received),
            np.where(is_fresh, 0, applied),
            *(passes[name][nexts] for name in ("plan_ns", "scheduled_ns", "built_ns", "sent_ns", "step_received_ns")),
        ),
        axis=1,
    )


def _first_admitted(passes: Passes, nexts: Int64s, tables: SpanTables) -> tuple[Int64s, Int64s]:
    """When the first request was received and prepared, for each step before which nothing ran; else 0.

    That is so if every request that runs after the step was planned came with this very step.
    """
    accepted, admitted = tables[RecordKind.REQUEST_ACCEPTED], tables[RecordKind.REQUEST_ADMITTED]
    times_by_key = {
        key: (received, prepared)
        for key, received, prepared in zip(
            *(accepted[name].tolist() for name in ("key", "received_ns", "prepared_ns")), strict=True
        )
    }
    times_by_step: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    steps = zip(*(admitted[name].tolist() for name in ("rank", "epoch", "step_id", "key")), strict=True)
    for rank, epoch, step_id, key in steps:
        times_by_step.setdefault((rank, epoch, step_id), []).append(times_by_key.get(key, (0, 0)))
    firsts = np.zeros((2, len(nexts)), np.int64)
    wanted = zip(*(passes[name][nexts].tolist() for name in ("rank", "epoch", "step_id", "num_running")), strict=True)
    for at, (rank, epoch, step_id, num_running) in enumerate(wanted):
        times = times_by_step.get((rank, epoch, step_id))
        if times is not None and len(times) == num_running:
            firsts[:, at] = np.min(times, axis=0)
    return firsts[0], firsts[1]


def _result_before(passes: Passes, nexts: Int64s) -> tuple[Int64s, Int64s]:
    """When the last result that was applied before each step was planned came in, and was applied; else 0."""
    came, applied = np.zeros((2, len(nexts)), np.int64)
    for rank in passes.ranks:
        results = np.flatnonzero(passes["rank"] == rank)
        is_own = passes["rank"][nexts] == rank
        applied_ns = passes["applied_ns"][results]
        at = np.searchsorted(applied_ns, passes["plan_ns"][nexts[is_own]], side="right") - 1
        is_there = at >= 0
        came[is_own] = np.where(is_there, passes["result_received_ns"][results][at], 0)
        applied[is_own] = np.where(is_there, applied_ns[at], 0)
    return came, applied


def overlap_share(passes: Passes) -> float | None:
    """The share of the frontend's planning time (schedule to send) in which the worker it planned for was busy.

    None if nothing was planned while the worker was watched: between its first pass and the end of its last.
    """
    overlapped_ns = planned_ns = 0
    for rank in passes.ranks:
        own = passes.of_rank(rank)
        steps = own.where((own["micro_step"] == 0) & (own["plan_ns"] >= own["started_ns"][0]))
        planned_ns += int((steps["sent_ns"] - steps["plan_ns"]).sum())
        busy_ns = busy_until(own, steps["sent_ns"]) - busy_until(own, steps["plan_ns"])
        overlapped_ns += int(busy_ns.sum())
    return overlapped_ns / planned_ns if planned_ns else None


def busy_until(own: Passes, times_ns: Int64s) -> Int64s:
    """How long a worker was busy from its first pass up to each of these times, ns. `own` are its passes."""
    started, done = own["started_ns"], own["done_ns"]
    before_ns = np.concatenate(([0], np.cumsum(done - started)))
    at = np.searchsorted(started, times_ns, side="right")  # passes that began by then
    running_ns = np.where(at > 0, np.maximum(done[at - 1] - times_ns, 0), 0)
    return np.asarray(before_ns[at] - running_ns, np.int64)
