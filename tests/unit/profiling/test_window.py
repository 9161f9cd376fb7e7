"""Figures of the last seconds."""

from __future__ import annotations

import pytest

from procengine.profiling.records import RecordKind
from procengine.profiling.snapshot import SpanTables
from procengine.profiling.window import Percentiles, Window
from tests.unit.profiling.synthetic import Recorder

S = 10**9
NOTHING = Percentiles()


def request(recorder: Recorder, key: int, at_ns: int) -> None:
    """One that was sent 1 s before `at_ns`, had its first of 6 tokens after half a second, and ended then."""
    recorder.add(
        RecordKind.REQUEST_DONE,
        key,
        client_sent_ns=at_ns - S,
        received_ns=at_ns - S,
        prepared_ns=at_ns - S,
        admitted_ns=at_ns - 3 * S // 4,
        first_token_ns=at_ns - S // 2,
        last_token_ns=at_ns,
        detokenized_ns=at_ns,
        delivered_ns=at_ns,
        num_prompt_tokens=40,
        num_cached_tokens=10,
        num_output_tokens=6,
        finish_code=2,
    )


def run_pass(recorder: Recorder, step_id: int, started_ns: int, done_ns: int, num_rows: int = 4) -> None:
    """A pass that was planned just before it started."""
    sent = [started_ns - at for at in (60, 50, 40, 30, 20)]
    run = [started_ns - 10, started_ns - 5, started_ns, started_ns, started_ns, done_ns]
    back = [done_ns + at for at in (1, 2, 3, 4, 5)]
    applied = [done_ns + at for at in (6, 7, 8)]
    recorder.one_pass(step_id, [*sent, *run, *back, *applied, *applied], num_rows=num_rows)


def test_nothing_is_nothing() -> None:
    figures = Window(5).figures(100 * S, num_workers=2)
    assert (figures.seconds, figures.output_tokens, figures.requests, figures.steps) == (5, 0, 0, 0)
    assert figures.rows is None and figures.prefix_hit_rate is None
    assert figures.ttft_ms == figures.itl_ms == figures.e2e_ms == NOTHING
    assert [(worker.rank, worker.busy, worker.bubble, worker.causes) for worker in figures.workers] == [
        (0, 0.0, 0.0, {}),
        (1, 0.0, 0.0, {}),
    ]


def test_rates_and_latencies_of_what_is_recent() -> None:
    recorder = Recorder()
    for key in range(20):
        request(recorder, key, (80 + key) * S)  # one a second, until 99
        recorder.add(RecordKind.RESULT_APPLIED, key, applied_ns=(80 + key) * S, num_tokens=6)
    window = Window(10)
    window.add(recorder.tables(), 100 * S)
    figures = window.figures(100 * S, 1)
    assert (figures.requests, figures.output_tokens) == (1.0, 6.0)
    assert figures.ttft_ms == Percentiles(500, 500, 500)
    assert figures.e2e_ms == Percentiles(1000, 1000, 1000)
    assert figures.queue_ms == Percentiles(250, 250, 250)
    assert figures.prefix_hit_rate == 0.25


def test_what_is_old_goes_and_what_comes_is_added() -> None:
    window = Window(10)
    for now in range(100, 130):
        recorder = Recorder()
        request(recorder, now, now * S)
        window.add(recorder.tables(), now * S)
        assert window.figures(now * S, 1).requests == min(now - 99, 11) / 10  # both edges count
    assert window.figures(200 * S, 1).requests == 0


def test_a_young_group_is_measured_over_its_life() -> None:
    recorder = Recorder()
    request(recorder, 0, 100 * S)
    window = Window(10)
    window.add(recorder.tables(), 100 * S)
    assert window.figures(100 * S, 1, uptime_s=2.0).requests == 0.5
    assert window.figures(100 * S, 1, uptime_s=200.0).requests == 0.1


def test_shares_of_a_workers_time() -> None:
    """Four passes of 1 s, with 0.5 s between them for which a step that came late is to blame."""
    recorder = Recorder()
    for step in range(4):
        run_pass(recorder, step, 91 * S + step * 3 * S // 2, 92 * S + step * 3 * S // 2)
    window = Window(10)
    window.add(recorder.tables(), 100 * S)
    figures = window.figures(100 * S, 1)
    (worker,) = figures.workers
    assert worker.busy == pytest.approx(0.4)
    assert worker.bubble == pytest.approx(0.15)
    assert sum(worker.causes.values()) == pytest.approx(worker.bubble)
    assert max(worker.causes, key=lambda cause: worker.causes[cause]) == "frontend busy"
    assert (figures.steps, figures.rows) == (0.4, 4.0)
    assert figures.itl_ms == Percentiles(1500, 1500, 1500)
    assert figures.hops_ms["to worker"].p50 == pytest.approx(1e-5)


def test_records_are_cut_by_their_last_time() -> None:
    recorder = Recorder()
    request(recorder, 0, 5 * S)
    request(recorder, 1, 6 * S)
    tables: SpanTables = recorder.tables()
    assert tables.since(5 * S + 1)[RecordKind.REQUEST_DONE]["key"].tolist() == [1]
