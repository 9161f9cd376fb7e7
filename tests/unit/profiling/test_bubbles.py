"""Gaps of a worker, divided by what it was waiting for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from procengine.profiling.bubbles import CAUSES, find_bubbles, overlap_share
from procengine.profiling.records import RecordKind
from procengine.profiling.snapshot import SpanTables
from procengine.profiling.steps import join_passes, worker_times
from tests.unit.profiling.synthetic import Recorder, random_run

PLANNED = [2000, 2010, 2030, 2060, 2100]  # schedule 10, build 20, encode 30, send 40
RUN = [2150, 2160, 2230, 2240, 2250, 2260]  # hop 50, queue 80
BACK = [2261, 2262, 2263, 2264, 2265]
APPLIED = [2270, 2271, 2272]
TAKEN = [2280, 2281, 2282]


def first_pass(done: int, came: int, applied: int) -> list[int]:
    """A pass that ends at `done`, and whose result the frontend takes in from `came` to `applied`."""
    planned = [100, 110, 120, 130, 140]
    back = [done + at for at in range(1, 6)]
    return [*planned, 150, 160, 170, 180, 190, done, *back, came, applied, applied, 5000, 5001, 5002]


def causes(recorder: Recorder) -> dict[str, int]:
    tables = recorder.tables()
    bubbles = find_bubbles(join_passes(tables), tables)
    assert len(bubbles) == 1
    assert bubbles.durations_ns.sum() == bubbles.parts_ns.sum() == sum(bubbles.ns_by_cause.values())
    return {cause: ns for cause, ns in bubbles.ns_by_cause.items() if ns}


CHAIN = {"schedule": 10, "build": 20, "encode+send": 70, "step hop": 50, "worker queue": 80}


def test_a_step_planned_after_the_result_came_back() -> None:
    recorder = Recorder()
    recorder.one_pass(0, first_pass(done=1000, came=1300, applied=1400), num_running=4)
    recorder.one_pass(1, [*PLANNED, *RUN, *BACK, *APPLIED, *TAKEN], num_running=4)
    assert causes(recorder) == {"result hop": 300, "decode+apply": 100, "frontend busy": 600, **CHAIN}


def test_a_step_that_was_there_in_time_waits_for_the_worker_alone() -> None:
    recorder = Recorder()
    recorder.one_pass(0, first_pass(done=2200, came=2290, applied=2295), num_running=4)
    recorder.one_pass(1, [*PLANNED, *RUN, *BACK, 2300, 2301, 2302, *TAKEN], num_running=4)
    assert causes(recorder) == {"worker queue": 30}


def test_what_was_over_before_the_gap_began_costs_nothing() -> None:
    recorder = Recorder()
    recorder.one_pass(0, first_pass(done=2020, came=2290, applied=2295), num_running=4)
    recorder.one_pass(1, [*PLANNED, *RUN, *BACK, 2300, 2301, 2302, *TAKEN], num_running=4)
    assert causes(recorder) == {"build": 10, "encode+send": 70, "step hop": 50, "worker queue": 80}


@pytest.mark.parametrize(
    ("received", "prepared", "expected"),
    [
        (1700, 1950, {"no request": 700, "tokenize": 250, "frontend busy": 50}),
        (900, 1950, {"tokenize": 950, "frontend busy": 50}),  # received while the worker was still busy
        (900, 950, {"result hop": 300, "decode+apply": 100, "frontend busy": 600}),  # ready, but it had to wait
    ],
)
def test_a_request_that_finds_nothing_running(received: int, prepared: int, expected: dict[str, int]) -> None:
    recorder = Recorder()
    recorder.one_pass(0, first_pass(done=1000, came=1300, applied=1400))
    recorder.accept(9, "r", received_ns=received, prepared_ns=prepared, accepted_ns=prepared + 1)
    recorder.add(RecordKind.REQUEST_ADMITTED, 9, step_id=1, sent_ns=2060)
    recorder.one_pass(1, [*PLANNED, *RUN, *BACK, *APPLIED, *TAKEN], num_running=1)
    assert causes(recorder) == {**expected, **CHAIN}


def test_a_request_that_joins_others_is_not_what_the_worker_waited_for() -> None:
    recorder = Recorder()
    recorder.one_pass(0, first_pass(done=1000, came=1300, applied=1400))
    recorder.accept(9, "r", received_ns=1700, prepared_ns=1950, accepted_ns=1951)
    recorder.add(RecordKind.REQUEST_ADMITTED, 9, step_id=1, sent_ns=2060)
    recorder.one_pass(1, [*PLANNED, *RUN, *BACK, *APPLIED, *TAKEN], num_running=2)
    assert "no request" not in causes(recorder) and "tokenize" not in causes(recorder)


def test_between_passes_of_one_step_the_worker_waits_for_itself() -> None:
    recorder = Recorder()
    recorder.one_pass(0, first_pass(done=1000, came=1300, applied=1400))
    recorder.one_pass(0, [*[0] * 5, 1000, 1000, 1040, 1050, 1060, 1070, *BACK, *APPLIED, *TAKEN], micro_step=1)
    assert causes(recorder) == {"worker queue": 40}


def test_overlap_by_hand() -> None:
    recorder = Recorder()
    recorder.one_pass(0, first_pass(done=2030, came=2290, applied=2295))
    recorder.one_pass(1, [*PLANNED, *RUN, *BACK, 2300, 2301, 2302, *TAKEN])
    # Planned from 2000 to 2100 while the worker was busy until 2030. Step 0 was planned before anything was watched.
    assert overlap_share(join_passes(recorder.tables())) == pytest.approx(0.3)


def test_nothing_to_say_of_nothing() -> None:
    tables = SpanTables.of([])
    passes = join_passes(tables)
    assert len(find_bubbles(passes, tables)) == 0 and overlap_share(passes) is None
    recorder = Recorder()
    recorder.one_pass(0, first_pass(done=1000, came=1300, applied=1400))
    assert overlap_share(join_passes(recorder.tables())) is None


@given(st.integers(0, 2**32))
def test_parts_of_every_gap_add_up_to_it(seed: int) -> None:
    tables = random_run(seed)
    passes = join_passes(tables)
    bubbles = find_bubbles(passes, tables)
    assert bubbles.parts_ns.shape == (len(passes) - len(passes.ranks), len(CAUSES))
    assert (bubbles.parts_ns >= 0).all()
    gaps = passes["started_ns"][bubbles.next_pass] - passes["done_ns"][bubbles.next_pass - 1]
    assert (bubbles.durations_ns == gaps).all()
    for worker in worker_times(passes):
        assert bubbles.of_rank(worker.rank).durations_ns.sum() == worker.idle_ns
    overlap = overlap_share(passes)
    assert overlap is None or 0 <= overlap <= 1


@given(st.integers(0, 2**32))
def test_overlap_is_what_counting_nanoseconds_says(seed: int) -> None:
    passes = join_passes(random_run(seed, num_steps=4, num_workers=1))
    start, end = int(passes["plan_ns"].min()), int(passes["done_ns"].max())
    is_busy = np.zeros(end - start + 1, np.bool_)
    for began, done in zip(passes["started_ns"].tolist(), passes["done_ns"].tolist(), strict=True):
        is_busy[began - start : done - start] = True
    planned = overlapped = 0
    firsts = passes.where((passes["micro_step"] == 0) & (passes["plan_ns"] >= passes["started_ns"][0]))
    for began, done in zip(firsts["plan_ns"].tolist(), firsts["sent_ns"].tolist(), strict=True):
        planned += done - began
        overlapped += int(is_busy[began - start : done - start].sum())
    expected = overlapped / planned if planned else None
    assert overlap_share(passes) == (None if expected is None else pytest.approx(expected))
