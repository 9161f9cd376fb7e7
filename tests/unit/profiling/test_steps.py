"""Passes joined from records of several processes, and where a worker's time went."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from procengine.profiling.records import RecordKind
from procengine.profiling.snapshot import SpanTables
from procengine.profiling.steps import LOOP_STAGES, PASS_TIMES, TEXT_STAGES, join_passes, worker_times
from tests.unit.profiling.synthetic import Recorder, random_run


def times(start: int) -> list[int]:
    """22 times, 10 ns apart."""
    return list(range(start, start + 220, 10))


def test_a_pass_has_the_times_of_all_its_records() -> None:
    recorder = Recorder()
    recorder.one_pass(7, times(1000), rank=1, num_rows=3)
    recorder.add(RecordKind.FLUSHED, 0, started_ns=1205, detokenized_ns=1206, delivered_ns=1207)
    recorder.add(RecordKind.FLUSHED, 1, started_ns=1220, detokenized_ns=1230, delivered_ns=1240)
    recorder.add(RecordKind.FLUSHED, 2, started_ns=1300, detokenized_ns=1310, delivered_ns=1320)
    passes = join_passes(recorder.tables())
    assert len(passes) == 1 and passes.ranks == [1]
    assert [passes[name].tolist() for name in ("rank", "epoch", "step_id", "micro_step")] == [[1], [0], [7], [0]]
    row = [int(passes[name][0]) for name in PASS_TIMES]
    assert sorted(row) == [*times(1000), 1220, 1230, 1240]
    assert int(passes["num_rows"][0]) == 3
    # The flush is the first that began when the tokens were taken.
    assert passes["delivered_ns"].tolist() == [1240]


def test_stages_from_plan_to_apply_have_no_hole() -> None:
    for stages in (LOOP_STAGES, TEXT_STAGES):
        assert [stage.end for stage in stages[:-1]] == [stage.begin for stage in stages[1:]]
        assert len({(stage.process, stage.name) for stage in stages}) == len(stages)
    assert (LOOP_STAGES[0].begin, LOOP_STAGES[-1].end) == ("plan_ns", "applied_ns")


def test_passes_at_the_edges_are_left_out() -> None:
    recorder = Recorder()
    for step_id in range(3):
        recorder.one_pass(step_id, times(1000 * (step_id + 1)))
    kinds = [RecordKind.STEP_SENT, RecordKind.STEP_RUN, RecordKind.RESULT_SENT, RecordKind.RESULT_APPLIED]
    for kind in [*kinds, RecordKind.RESULT_TAKEN]:
        left = [row for row in recorder.records if not (row[0] == kind and row[1] in (0, 2))]
        assert join_passes(Recorder(left).tables())["step_id"].tolist() == [1]


def test_without_records_there_are_no_passes() -> None:
    passes = join_passes(SpanTables.of([]))
    assert len(passes) == 0 and passes.ranks == [] and worker_times(passes) == [] and passes.follows.tolist() == []


def test_equal_step_ids_of_two_workers_and_two_lives_are_different_passes() -> None:
    recorder = Recorder()
    for at, (rank, epoch) in enumerate([(1, 1), (0, 0), (1, 0)]):
        recorder.one_pass(5, times(1000 * (at + 1)), rank=rank, epoch=epoch)
    passes = join_passes(recorder.tables())
    assert list(zip(passes["rank"].tolist(), passes["epoch"].tolist(), strict=True)) == [(0, 0), (1, 0), (1, 1)]
    assert passes["plan_ns"].tolist() == [2000, 3000, 1000]
    assert passes.follows.tolist() == [False] * 3


def test_a_sender_that_reads_the_clock_late_makes_no_negative_hop() -> None:
    recorder = Recorder()
    late = times(1000)
    late[4] = late[5] + 3  # sent, as the frontend says, after the worker had it
    recorder.one_pass(0, late)
    passes = join_passes(recorder.tables())
    assert passes["sent_ns"].tolist() == passes["step_received_ns"].tolist() == [late[5]]


def test_worker_time_by_hand() -> None:
    recorder = Recorder()
    first, second, fourth = times(1000), times(2000), times(5000)
    recorder.one_pass(0, first)
    recorder.one_pass(1, second)
    recorder.one_pass(3, fourth)  # step 2 is not there
    (worker,) = worker_times(join_passes(recorder.tables()))
    # started, staged, forwarded, done are the 8th to 11th time: 1070 .. 1100.
    assert (worker.began_ns, worker.ended_ns) == (1070, 5100)
    assert (worker.stage_ns, worker.forward_ns, worker.sample_ns) == (30, 30, 30)
    assert (worker.idle_ns, worker.unknown_ns) == (2070 - 1100, 5070 - 2100)
    assert worker.bubble_share == pytest.approx(970 / (970 + 90))


@given(st.integers(0, 2**32))
def test_parts_add_up(seed: int) -> None:
    passes = join_passes(random_run(seed))
    assert set(passes.ranks) == {0, 1}
    for worker in worker_times(passes):
        assert worker.unknown_ns == 0
        assert worker.busy_ns + worker.idle_ns == worker.total_ns
    is_first = passes["micro_step"] == 0
    for stage in LOOP_STAGES:
        assert (passes.durations(stage) >= 0).all(), stage
    own = passes.where(is_first)
    total = np.sum([own.durations(stage) for stage in LOOP_STAGES], axis=0)
    assert (total == own["applied_ns"] - own["plan_ns"]).all()
