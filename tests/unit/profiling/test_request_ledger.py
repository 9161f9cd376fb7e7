"""Which requests are unfinished, whatever the order in which rings were read."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from procengine.profiling.records import RecordKind
from procengine.profiling.request_ledger import RequestLedger, WorkerGauges
from procengine.profiling.snapshot import SpanTables
from tests.unit.profiling.synthetic import Recorder

Fill = Callable[[Recorder], object]
IDLE = WorkerGauges(0, 0, 0, None)


def tables(*fills: Fill, num_lost: int = 0) -> SpanTables:
    recorder = Recorder()
    for fill in fills:
        fill(recorder)
    return recorder.tables(num_lost)


def accept(key: int, rank: int = 0, accepted_ns: int = 100, num_prompt_tokens: int = 10) -> Fill:
    return lambda r: r.accept(key, f"r{key}", rank=rank, accepted_ns=accepted_ns, num_prompt_tokens=num_prompt_tokens)


def admit(key: int, num_cached_tokens: int = 4, num_preemptions: int = 0) -> Fill:
    return lambda r: r.add(
        RecordKind.REQUEST_ADMITTED,
        key,
        sent_ns=200,
        num_cached_tokens=num_cached_tokens,
        num_preemptions=num_preemptions,
    )


def done(key: int, admitted_ns: int = 200, num_preemptions: int = 0) -> Fill:
    return lambda r: r.add(
        RecordKind.REQUEST_DONE,
        key,
        admitted_ns=admitted_ns,
        num_prompt_tokens=10,
        num_cached_tokens=4,
        num_preemptions=num_preemptions,
        finish_code=2,
    )


def step(num_running: int, num_waiting: int, sent_ns: int = 200, rank: int = 0) -> Fill:
    return lambda r: r.add(
        RecordKind.STEP_SENT,
        0,
        rank=rank,
        sent_ns=sent_ns,
        num_running=num_running,
        num_waiting=num_waiting,
        num_free_blocks=7,
        num_in_flight=2,
    )


def test_a_request_waits_runs_and_is_gone() -> None:
    ledger = RequestLedger()
    ledger.add(tables(accept(0)))
    assert ledger.gauges(2) == [WorkerGauges(0, 1, 0, None), IDLE]
    ledger.add(tables(admit(0), step(1, 0)))
    assert ledger.gauges(2) == [WorkerGauges(1, 0, 2, 7), IDLE]
    ledger.add(tables(accept(1, accepted_ns=300), accept(2, rank=1, accepted_ns=300)))
    assert ledger.gauges(2) == [WorkerGauges(1, 1, 2, 7), WorkerGauges(0, 1, 0, None)]
    ledger.add(tables(done(0), done(1, admitted_ns=0), done(2, admitted_ns=0)))
    assert ledger.gauges(2) == [IDLE, IDLE]
    assert (ledger.num_accepted, ledger.num_prompt_tokens, ledger.num_cached_tokens) == (3, 10, 4)


@pytest.mark.parametrize(
    "order", [("accept", "admit", "done"), ("accept", "done", "admit"), ("done", "accept", "admit")], ids=" ".join
)
def test_totals_do_not_depend_on_what_was_read_first(order: tuple[str, ...]) -> None:
    """Within the frontend's ring the order holds; the end, from another ring, may come at any time."""
    fills = {"accept": accept(0), "admit": admit(0), "done": done(0)}
    ledger = RequestLedger()
    for name in order:
        ledger.add(tables(fills[name]))
    assert (ledger.num_unfinished, ledger.num_accepted) == (0, 1)
    assert (ledger.num_prompt_tokens, ledger.num_cached_tokens, ledger.num_preemptions) == (10, 4, 0)
    assert ledger.is_complete


@pytest.mark.parametrize("seed", range(20))
def test_preemptions_count_once_each(seed: int) -> None:
    draw = random.Random(seed)
    frontend, output = [accept(0), *(admit(0, num_preemptions=n) for n in range(4))], [done(0, num_preemptions=3)]
    ledger = RequestLedger()
    while frontend or output:
        taken, ended = draw.randint(0, len(frontend)), draw.randint(0, len(output))
        ledger.add(tables(*frontend[:taken], *output[:ended]))
        frontend, output = frontend[taken:], output[ended:]
    assert ledger.num_preemptions == 3
    assert (ledger.num_unfinished, ledger.num_prompt_tokens) == (0, 10)


def test_coming_back_from_a_worker_that_died_is_no_preemption() -> None:
    ledger = RequestLedger()
    ledger.add(tables(accept(0), admit(0), admit(0), admit(0, num_preemptions=1)))
    assert (ledger.num_preemptions, ledger.num_prompt_tokens) == (1, 10)
    ledger.add(tables(done(0, num_preemptions=1)))
    assert ledger.num_preemptions == 1


def test_a_request_that_was_never_admitted_brings_no_prompt_tokens() -> None:
    ledger = RequestLedger()
    ledger.add(tables(accept(0), done(0, admitted_ns=0)))
    assert (ledger.num_unfinished, ledger.num_prompt_tokens) == (0, 0)


def test_where_records_are_missing_the_frontend_is_believed() -> None:
    ledger = RequestLedger()
    ledger.add(tables(accept(41), step(3, 2)))
    assert not ledger.is_complete
    assert ledger.gauges(1, num_unfinished=6) == [WorkerGauges(3, 2, 2, 7)]
    assert ledger.gauges(1, num_unfinished=0) == [IDLE]
    assert ledger.num_unfinished == 1  # what was said may be older than what was read


def test_requests_whose_end_was_missed_are_forgotten_once_the_frontend_has_none() -> None:
    ledger = RequestLedger()
    ledger.add(tables(accept(41, accepted_ns=100), accept(42, accepted_ns=300)))
    ledger.forget_before(200)
    assert ledger.num_unfinished == 1
    ledger.add(tables(admit(42)))
    assert ledger.num_prompt_tokens == 10


def test_lost_records_are_noticed() -> None:
    ledger = RequestLedger()
    ledger.add(tables(accept(0)))
    assert ledger.is_complete
    ledger.add(tables(num_lost=1))
    assert not ledger.is_complete


def test_ends_of_requests_from_before_change_nothing() -> None:
    ledger = RequestLedger()
    ledger.add(tables(accept(5)))
    ledger.add(tables(done(3), done(4, num_preemptions=2)))
    assert (ledger.num_unfinished, ledger.num_prompt_tokens, ledger.num_preemptions) == (1, 0, 0)
