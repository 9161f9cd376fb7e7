"""`PassTotals`: what forward passes cost since counting began: phases, hops, gaps between tokens, bubbles. Pure.

Owns: which passes were counted. Never does: join records or explain gaps (`steps`, `bubbles`).

Records of one pass come from three processes, which are read one after the other. So what was read is kept until the
passes in it are complete, and a few steps longer: a gap is between two passes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from procengine.profiling.bubbles import CAUSES, find_bubbles
from procengine.profiling.histogram import Histogram
from procengine.profiling.records import COLUMNS, RecordKind
from procengine.profiling.snapshot import SpanTables, Table
from procengine.profiling.steps import LOOP_STAGES, TEXT_STAGES, Passes, Stage, join_passes

__all__ = ["PassTotals", "token_gaps"]

_HOP_BOUNDS: Final = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1, 1.0)
_PHASE_BOUNDS: Final = (1e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 1.0)
_TOKEN_GAP_BOUNDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_STEP_TOKEN_BOUNDS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FLUSH_TIMES: Final = ("flush_started_ns", "detokenized_ns", "delivered_ns")
_PASS_STAGES: Final = (*LOOP_STAGES, *(stage for stage in TEXT_STAGES if stage.end not in _FLUSH_TIMES))
_FLUSH_STAGES: Final = (  # one flush serves several passes, and several workers: counted once, from its own record
    Stage("output", "detokenize", "started_ns", "detokenized_ns"),
    Stage("output", "deliver", "detokenized_ns", "delivered_ns"),
)
_NUM_KEPT_STEPS: Final = 4  # more than can be in flight
_MICRO_STEPS: Final = 1 << 8
_STEPS: Final = 1 << 40
_BY_STEP: Final = tuple(kind for kind, columns in COLUMNS.items() if "epoch" in columns)


class PassTotals:
    """Feed it all tables, oldest first.

    Attributes:
        phases: seconds by (process, phase).
        hops: seconds by name: "to worker", "to frontend", "to output".
        token_gaps: seconds between a decoding row's tokens.
        step_tokens: tokens a step computes.
        bubble_ns: by (worker, cause).
        busy_ns: by worker.
        num_passes: complete ones.
    """

    def __init__(self) -> None:
        stages = [stage for stage in (*_PASS_STAGES, *_FLUSH_STAGES) if stage.process != "hop"]
        self.phases = {(stage.process, stage.name): Histogram(_PHASE_BOUNDS) for stage in stages}
        self.hops = {stage.name: Histogram(_HOP_BOUNDS) for stage in _PASS_STAGES if stage.process == "hop"}
        self.token_gaps = Histogram(_TOKEN_GAP_BOUNDS)
        self.step_tokens = Histogram(_STEP_TOKEN_BOUNDS)
        self.bubble_ns: dict[tuple[int, str], int] = {}
        self.busy_ns: dict[int, int] = {}
        self.num_passes = 0
        self._kept = SpanTables.of([])
        self._counted: dict[int, int] = {}  # rank -> the newest pass that was counted

    def add(self, tables: SpanTables) -> None:
        """Take in what is new."""
        self.step_tokens.observe(tables[RecordKind.STEP_SENT]["num_tokens"])
        flushes = tables[RecordKind.FLUSHED]
        for stage in _FLUSH_STAGES:
            self.phases[stage.process, stage.name].observe((flushes[stage.end] - flushes[stage.begin]) / 1e9)
        kept = self._kept.joined(tables)
        passes = join_passes(kept)
        is_new = _order(passes) > np.array([self._counted.get(rank, -1) for rank in passes["rank"].tolist()], np.int64)
        self._count(passes, is_new, kept)
        for rank in passes.ranks:
            self._counted[rank] = max(self._counted.get(rank, -1), int(_order(passes.of_rank(rank))[-1]))
        self._kept = self._still_needed(kept)

    def _count(self, passes: Passes, is_new: NDArray[np.bool_], tables: SpanTables) -> None:
        new = passes.where(is_new)
        self.num_passes += len(new)
        for stage in _PASS_STAGES:
            target = self.hops[stage.name] if stage.process == "hop" else self.phases[stage.process, stage.name]
            target.observe(new.durations(stage) / 1e9)
        gaps_s, weights = token_gaps(passes, is_new)
        self.token_gaps.observe(gaps_s, weights)
        bubbles = find_bubbles(passes, tables)
        parts_ns, ranks = bubbles.parts_ns[is_new[bubbles.next_pass]], bubbles.ranks[is_new[bubbles.next_pass]]
        for rank in new.ranks:
            own = new.of_rank(rank)
            self.busy_ns[rank] = self.busy_ns.get(rank, 0) + int((own["done_ns"] - own["started_ns"]).sum())
            for cause, idle_ns in zip(CAUSES, parts_ns[ranks == rank].sum(axis=0).tolist(), strict=True):
                self.bubble_ns[rank, cause] = self.bubble_ns.get((rank, cause), 0) + idle_ns

    def _still_needed(self, tables: SpanTables) -> SpanTables:
        """Records of passes that are not complete, and of the last ones that are."""
        kept = {kind: table.where(np.zeros(len(table), np.bool_)) for kind, table in tables.tables.items()}
        for kind in _BY_STEP:
            kept[kind] = tables[kind].where(self._is_recent(tables[kind]))
        accepted, admitted = tables[RecordKind.REQUEST_ACCEPTED], tables[RecordKind.REQUEST_ADMITTED]
        is_waiting = ~np.isin(accepted["key"], admitted["key"]) & ~np.isin(
            accepted["key"], tables[RecordKind.REQUEST_DONE]["key"]
        )
        kept[RecordKind.REQUEST_ACCEPTED] = accepted.where(
            is_waiting | np.isin(accepted["key"], kept[RecordKind.REQUEST_ADMITTED]["key"])
        )
        return SpanTables(kept)

    def _is_recent(self, table: Table) -> NDArray[np.bool_]:
        steps = table["step_id" if table.kind is RecordKind.REQUEST_ADMITTED else "key"]
        first = np.array([self._counted.get(rank, -1) for rank in table["rank"].tolist()], np.int64) // _MICRO_STEPS
        return np.asarray(table["epoch"] * _STEPS + steps >= first - _NUM_KEPT_STEPS, np.bool_)


def _order(passes: Passes) -> NDArray[np.int64]:
    """int64 [n], rising in the order in which a worker runs its passes."""
    steps = passes["epoch"] * _STEPS + passes["step_id"]
    return np.asarray(steps * _MICRO_STEPS + passes["micro_step"], np.int64)


def token_gaps(
    passes: Passes, selected: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """How long rows that decode waited for their next token, as the output process saw it.

    Returns:
        Seconds, float64 [m], and for how many rows each counts, int64 [m]. A row is taken to be in every pass while it
        decodes; one that had to sit out (a grammar, a preemption) waited longer than this says.
    """
    counts = passes.follows if selected is None else passes.follows & selected
    counts = counts & np.concatenate((np.zeros(min(len(passes), 1), np.bool_), np.diff(passes["rank"]) == 0))
    at = np.flatnonzero(counts)
    gaps_s = (passes["text_received_ns"][at] - passes["text_received_ns"][at - 1]) / 1e9
    is_first = passes["micro_step"][at] == 0
    weights = np.where(is_first, passes["num_decode_rows"][at], passes["num_rows"][at])
    return gaps_s, weights.astype(np.int64)
