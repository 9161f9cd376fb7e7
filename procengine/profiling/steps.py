"""Forward passes, joined across processes: one row a pass, with all its times from plan to text. Pure.

Owns: the joining, and the names of a pass's times and stages. Never does: read a ring, or say what a gap means
(`bubbles`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from procengine.profiling.records import RecordKind
from procengine.profiling.snapshot import SpanTables, Table

__all__ = ["LOOP_STAGES", "PASS_TIMES", "TEXT_STAGES", "Passes", "Stage", "WorkerTime", "join_passes", "worker_times"]

Int64s = NDArray[np.int64]

# Column of a pass -> (record it comes from, its column there).
_SOURCES: Final[dict[str, tuple[RecordKind, str]]] = {
    "plan_ns": (RecordKind.STEP_SENT, "plan_ns"),
    "scheduled_ns": (RecordKind.STEP_SENT, "scheduled_ns"),
    "built_ns": (RecordKind.STEP_SENT, "built_ns"),
    "encoded_ns": (RecordKind.STEP_SENT, "encoded_ns"),
    "sent_ns": (RecordKind.STEP_SENT, "sent_ns"),
    "step_received_ns": (RecordKind.STEP_RUN, "received_ns"),
    "step_decoded_ns": (RecordKind.STEP_RUN, "decoded_ns"),
    "started_ns": (RecordKind.STEP_RUN, "started_ns"),
    "staged_ns": (RecordKind.STEP_RUN, "staged_ns"),
    "forwarded_ns": (RecordKind.STEP_RUN, "forwarded_ns"),
    "done_ns": (RecordKind.STEP_RUN, "done_ns"),
    "woken_ns": (RecordKind.RESULT_SENT, "woken_ns"),
    "on_host_ns": (RecordKind.RESULT_SENT, "on_host_ns"),
    "result_encoded_ns": (RecordKind.RESULT_SENT, "encoded_ns"),
    "result_sent_ns": (RecordKind.RESULT_SENT, "sent_ns"),
    "text_sent_ns": (RecordKind.RESULT_SENT, "text_sent_ns"),
    "result_received_ns": (RecordKind.RESULT_APPLIED, "received_ns"),
    "result_decoded_ns": (RecordKind.RESULT_APPLIED, "decoded_ns"),
    "applied_ns": (RecordKind.RESULT_APPLIED, "applied_ns"),
    "text_received_ns": (RecordKind.RESULT_TAKEN, "received_ns"),
    "text_decoded_ns": (RecordKind.RESULT_TAKEN, "decoded_ns"),
    "taken_ns": (RecordKind.RESULT_TAKEN, "taken_ns"),
    "num_rows": (RecordKind.STEP_RUN, "num_rows"),  # tokens sampled: result rows
    "num_tokens": (RecordKind.STEP_RUN, "num_tokens"),
    "num_step_rows": (RecordKind.STEP_SENT, "num_rows"),
    "num_decode_rows": (RecordKind.STEP_SENT, "num_decode_rows"),
    "num_waiting": (RecordKind.STEP_SENT, "num_waiting"),
    "num_running": (RecordKind.STEP_SENT, "num_running"),
    "num_free_blocks": (RecordKind.STEP_SENT, "num_free_blocks"),
    "num_in_flight": (RecordKind.STEP_SENT, "num_in_flight"),
    "num_finished": (RecordKind.RESULT_APPLIED, "num_finished"),
}
_HOPS: Final = (
    ("sent_ns", "step_received_ns"),
    ("result_sent_ns", "result_received_ns"),
    ("text_sent_ns", "text_received_ns"),
)
_KEYS: Final = ("rank", "epoch", "step_id", "micro_step")
_FLUSH_TIMES: Final = ("flush_started_ns", "detokenized_ns", "delivered_ns")
PASS_TIMES: Final = tuple(name for name in _SOURCES if name.endswith("_ns")) + _FLUSH_TIMES


class Stage(NamedTuple):
    """A stretch of a pass between two of its times, in the process that spends it.

    Attributes:
        once_a_step: passes after a step's first one do not have it.
    """

    process: str
    name: str
    begin: str
    end: str
    once_a_step: bool = False


# From the plan to the result applied, without a hole: they add up to the round trip of a step.
LOOP_STAGES: Final = (
    Stage("frontend", "schedule", "plan_ns", "scheduled_ns", True),
    Stage("frontend", "build", "scheduled_ns", "built_ns", True),
    Stage("frontend", "encode", "built_ns", "encoded_ns", True),
    Stage("frontend", "send", "encoded_ns", "sent_ns", True),
    Stage("hop", "to worker", "sent_ns", "step_received_ns", True),
    Stage("worker", "decode", "step_received_ns", "step_decoded_ns", True),
    Stage("worker", "queue", "step_decoded_ns", "started_ns"),
    Stage("worker", "stage", "started_ns", "staged_ns"),
    Stage("worker", "forward", "staged_ns", "forwarded_ns"),
    Stage("worker", "sample", "forwarded_ns", "done_ns"),
    Stage("worker", "wake sender", "done_ns", "woken_ns"),
    Stage("worker", "copy to host", "woken_ns", "on_host_ns"),
    Stage("worker", "encode result", "on_host_ns", "result_encoded_ns"),
    Stage("worker", "send result", "result_encoded_ns", "result_sent_ns"),
    Stage("hop", "to frontend", "result_sent_ns", "result_received_ns"),
    Stage("frontend", "decode result", "result_received_ns", "result_decoded_ns"),
    Stage("frontend", "apply", "result_decoded_ns", "applied_ns"),
)
# What becomes of the same result on its way to clients, beside the loop. Then it waits for a flush, which has times of
# its own: what goes out with one may be of several passes, and a pass's text may be held back for long.
TEXT_STAGES: Final = (
    Stage("worker", "send text", "result_sent_ns", "text_sent_ns"),
    Stage("hop", "to output", "text_sent_ns", "text_received_ns"),
    Stage("output", "decode", "text_received_ns", "text_decoded_ns"),
    Stage("output", "take tokens", "text_decoded_ns", "taken_ns"),
)


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward passes by rank, epoch, step id and micro step, which is the order in which a worker ran them.

    `passes["started_ns"]` is int64 [n]. Columns: rank, epoch, step_id, micro_step, the times `PASS_TIMES` and the
    counts of `STEP_SENT` and `STEP_RUN` (`num_rows` and `num_tokens` are of the pass, `num_step_rows` of its step).
    Times of the flush that carried the pass's text are 0 where it had no tokens or was not captured.
    """

    columns: dict[str, Int64s]

    def __getitem__(self, column: str) -> Int64s:
        return self.columns[column]

    def __len__(self) -> int:
        return len(self.columns["step_id"])

    def where(self, selected: NDArray[np.bool_] | NDArray[np.int64] | slice) -> Passes:
        """Some of the rows: bool [n], or their indices."""
        return Passes({name: column[selected] for name, column in self.columns.items()})

    def of_rank(self, rank: int) -> Passes:
        """Those of one worker."""
        return self.where(self["rank"] == rank)

    @property
    def ranks(self) -> list[int]:
        """Workers that ran any."""
        return sorted(set(self["rank"].tolist()))

    @property
    def follows(self) -> NDArray[np.bool_]:
        """bool [n]: the worker ran this pass right after the one in the row before. False for the first row, and where
        the worker was restarted or records are missing."""
        rank, epoch, step, micro_step = (self[name] for name in _KEYS)
        is_next_pass = (np.diff(step) == 0) & (np.diff(micro_step) == 1)
        is_next_step = (np.diff(step) == 1) & (micro_step[1:] == 0)
        follows = (np.diff(rank) == 0) & (np.diff(epoch) == 0) & (is_next_pass | is_next_step)
        return np.concatenate((np.zeros(min(len(self), 1), np.bool_), follows))

    def durations(self, stage: Stage) -> Int64s:
        """ns int64 [m], of the passes that have the stage."""
        begin, end = self[stage.begin], self[stage.end]
        has = (end > 0) & (begin > 0)
        if stage.once_a_step:
            has &= self["micro_step"] == 0
        return np.asarray(end[has] - begin[has], np.int64)


def join_passes(tables: SpanTables) -> Passes:
    """Every pass of which all records are there; those at the edges of a capture, of which some are not, are left out.

    Records come from processes that were read one after the other, so an edge is never sharp.
    """
    runs = tables[RecordKind.STEP_RUN]
    run_keys = _keys(runs)
    rows_by_kind = {
        RecordKind.STEP_RUN: np.arange(len(runs)),
        RecordKind.STEP_SENT: _find(_keys(tables[RecordKind.STEP_SENT])[:, :3], run_keys[:, :3]),
        **{
            kind: _find(_keys(tables[kind]), run_keys)
            for kind in (RecordKind.RESULT_SENT, RecordKind.RESULT_APPLIED, RecordKind.RESULT_TAKEN)
        },
    }
    is_complete = np.all([rows >= 0 for rows in rows_by_kind.values()], axis=0)
    order = np.flatnonzero(is_complete)
    order = order[np.lexsort(run_keys[order].T[::-1])]
    columns = {name: run_keys[order, at] for at, name in enumerate(_KEYS)}
    for name, (kind, column) in _SOURCES.items():
        columns[name] = tables[kind][column][rows_by_kind[kind][order]]
    for sent, received in _HOPS:  # who sends may lose its core before it reads the clock: then the hop took no time
        columns[sent] = np.minimum(columns[sent], columns[received])
    columns |= _flush_times(tables[RecordKind.FLUSHED], columns["taken_ns"], columns["num_rows"] > 0)
    return Passes(columns)


def _keys(table: Table) -> Int64s:
    """int64 [n, 4]; the micro step of a whole step is 0."""
    has_micro_step = table.kind is not RecordKind.STEP_SENT
    micro_step = table["micro_step"] if has_micro_step else np.zeros(len(table), np.int64)
    return np.stack((table["rank"], table["epoch"], table["key"], micro_step), axis=1)


def _find(keys: Int64s, wanted: Int64s) -> Int64s:
    """Row in `keys` [n, k] of each of `wanted` [m, k], -1 where there is none.

    Of equal keys it is the first: results of a worker that died are shown to the output process once more.
    """
    at_by_key: dict[tuple[int, ...], int] = {}
    for at, key in enumerate(map(tuple, keys.tolist())):
        at_by_key.setdefault(key, at)
    return np.array([at_by_key.get(tuple(key), -1) for key in wanted.tolist()], np.int64)


def _flush_times(flushes: Table, taken_ns: Int64s, has_tokens: NDArray[np.bool_]) -> dict[str, Int64s]:
    """What was taken goes out with the next flush: one thread does both."""
    at = np.searchsorted(flushes["started_ns"], taken_ns)
    is_known = has_tokens & (at < len(flushes))
    times = (flushes[name] for name in ("started_ns", "detokenized_ns", "delivered_ns"))
    return {
        name: np.where(is_known, time[np.minimum(at, len(time) - 1)] if len(time) else 0, 0)
        for name, time in zip(_FLUSH_TIMES, times, strict=True)
    }


class WorkerTime(NamedTuple):
    """How a worker spent the time from its first pass to the end of its last, in ns. The parts add up to it."""

    rank: int
    began_ns: int
    ended_ns: int
    stage_ns: int
    forward_ns: int
    sample_ns: int
    idle_ns: int  # between a pass and the next
    unknown_ns: int  # around passes that are not in the tables

    @property
    def total_ns(self) -> int:
        """The whole stretch."""
        return self.ended_ns - self.began_ns

    @property
    def busy_ns(self) -> int:
        """In some pass."""
        return self.stage_ns + self.forward_ns + self.sample_ns

    @property
    def bubble_share(self) -> float:
        """Idle time as a share of what is known, 0 to 1."""
        known_ns = self.busy_ns + self.idle_ns
        return self.idle_ns / known_ns if known_ns else 0.0


def worker_times(passes: Passes) -> list[WorkerTime]:
    """One for each worker that ran a pass."""
    return [_worker_time(rank, passes.of_rank(rank)) for rank in passes.ranks]


def _worker_time(rank: int, own: Passes) -> WorkerTime:
    started, staged, forwarded, done = (own[name] for name in ("started_ns", "staged_ns", "forwarded_ns", "done_ns"))
    gaps, follows = started[1:] - done[:-1], own.follows[1:]
    return WorkerTime(
        rank,
        int(started[0]),
        int(done[-1]),
        int((staged - started).sum()),
        int((forwarded - staged).sum()),
        int((done - forwarded).sum()),
        int(gaps[follows].sum()),
        int(gaps[~follows].sum()),
    )
