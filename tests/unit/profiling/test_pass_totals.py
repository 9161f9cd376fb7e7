"""What passes cost: the same whatever the pieces in which rings were read."""

from __future__ import annotations

import random

import numpy as np
import pytest

from procengine.profiling.bubbles import find_bubbles
from procengine.profiling.pass_totals import PassTotals, token_gaps
from procengine.profiling.records import COLUMNS, RecordKind
from procengine.profiling.snapshot import SpanTables, Table
from procengine.profiling.steps import join_passes
from tests.unit.profiling.synthetic import Recorder, random_run

FRONTEND = (
    RecordKind.REQUEST_ACCEPTED,
    RecordKind.REQUEST_ADMITTED,
    RecordKind.STEP_SENT,
    RecordKind.RESULT_APPLIED,
)
WRITERS = (FRONTEND, (RecordKind.STEP_RUN,), (RecordKind.RESULT_SENT,), (RecordKind.RESULT_TAKEN,))


def in_pieces(tables: SpanTables, seed: int) -> list[SpanTables]:
    """As a reader would get them: of each ring a piece from the front, and of one more than of another."""
    draw = random.Random(seed)
    step_by_key = dict(
        zip(*(tables[RecordKind.REQUEST_ADMITTED][name].tolist() for name in ("key", "step_id")), strict=True)
    )
    rings: list[list[tuple[RecordKind, list[int]]]] = []
    for kinds in WRITERS:
        for rank in range(2):
            entries = []
            for number, kind in enumerate(kinds):
                table = tables[kind]
                for row in table.where(table["rank"] == rank).rows.tolist():
                    step = step_by_key[row[0]] if kind in FRONTEND[:2] else row[0]
                    micro = row[1 + COLUMNS[kind].index("micro_step")] if "micro_step" in COLUMNS[kind] else 0
                    entries.append((step, number, micro, kind, row))
            rings.append([(kind, row) for _, _, _, kind, row in sorted(entries, key=lambda e: e[:3])])
    pieces = []
    while any(rings):
        taken: dict[RecordKind, list[list[int]]] = {}
        for at, ring in enumerate(rings):
            count = draw.randint(0, 6)
            rings[at] = ring[count:]
            for kind, row in ring[:count]:
                taken.setdefault(kind, []).append(row)
        empty = SpanTables.of([]).tables
        pieces.append(
            SpanTables(
                {kind: Table(kind, np.array(taken[kind])) if kind in taken else empty[kind] for kind in RecordKind}
            )
        )
    return pieces


@pytest.mark.parametrize("seed", range(12))
def test_pieces_add_up_to_the_whole(seed: int) -> None:
    tables = random_run(seed)
    totals = PassTotals()
    for piece in in_pieces(tables, seed):
        totals.add(piece)
    passes = join_passes(tables)
    assert totals.num_passes == len(passes) > 0
    bubbles = find_bubbles(passes, tables)
    for rank in passes.ranks:
        own = passes.of_rank(rank)
        assert totals.busy_ns[rank] == (own["done_ns"] - own["started_ns"]).sum()
        found = {cause: ns for (r, cause), ns in totals.bubble_ns.items() if r == rank}
        assert found == bubbles.of_rank(rank).ns_by_cause
    gaps, weights = token_gaps(passes)
    assert totals.token_gaps.count == weights.sum()
    assert totals.token_gaps.sum == pytest.approx((gaps * weights).sum())
    hop_ns = (passes["step_received_ns"] - passes["sent_ns"])[passes["micro_step"] == 0]
    assert totals.hops["to worker"].count == len(hop_ns)
    assert totals.hops["to worker"].sum == pytest.approx(hop_ns.sum() / 1e9)


def test_what_is_counted_is_forgotten() -> None:
    totals = PassTotals()
    for step in range(100):
        recorder = Recorder()
        recorder.accept(step, "r", accepted_ns=step)
        recorder.add(RecordKind.REQUEST_ADMITTED, step, step_id=step, sent_ns=step)
        recorder.one_pass(step, list(range(1000 * step + 1, 1000 * step + 23)))
        totals.add(recorder.tables())
    assert totals.num_passes == 100
    assert sum(map(len, totals._kept.tables.values())) < 60


def test_a_flush_is_counted_once_whatever_it_carries() -> None:
    recorder = Recorder()
    recorder.one_pass(0, list(range(1, 23)))
    recorder.one_pass(1, list(range(101, 123)))
    recorder.add(RecordKind.FLUSHED, 0, started_ns=200, detokenized_ns=300, delivered_ns=500)
    totals = PassTotals()
    totals.add(recorder.tables())
    assert (totals.phases["output", "detokenize"].count, totals.phases["output", "detokenize"].sum) == (1, 1e-7)
    assert (totals.phases["output", "deliver"].count, totals.phases["output", "deliver"].sum) == (1, 2e-7)


def test_gaps_between_tokens_count_for_the_rows_that_decode() -> None:
    recorder = Recorder()
    recorder.one_pass(0, list(range(1, 23)), num_rows=5)
    recorder.one_pass(1, list(range(1001, 1023)), num_rows=3)
    gaps, weights = token_gaps(join_passes(recorder.tables()))
    assert gaps.tolist() == [1e-6] and weights.tolist() == [3]
