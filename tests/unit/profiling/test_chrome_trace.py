"""Traces, read by a reader that knows the format and not the writer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procengine.errors import ConfigError
from procengine.profiling.capture import Capture, GroupFacts, Joined, join_capture, only_request
from procengine.profiling.chrome_trace import encode_trace
from procengine.profiling.records import RecordKind
from procengine.profiling.snapshot import SpanTables
from procengine.profiling.steps import worker_times
from tests.unit.profiling.synthetic import Recorder, random_run
from tests.unit.profiling.trace_reader import Event, bubble_share, check_trace, load_slices, read_trace

PIDS = {"supervisor": 10, "of-a-later-version": 9, "worker-0": 11, "worker-1": 12, "frontend": 13, "output": 14}


def joined_of(tables: SpanTables, ended_ns: int = 10**10) -> Joined:
    return join_capture(Capture(GroupFacts("g", "m", PIDS, 100), 0, ended_ns, tables, {}))


def events_of(joined: Joined) -> list[Event]:
    events = read_trace(encode_trace(joined))
    check_trace(events)
    return events


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_any_run_makes_a_trace_that_the_format_allows(seed: int) -> None:
    joined = joined_of(random_run(seed))
    db = load_slices(events_of(joined))
    workers = worker_times(joined.passes)
    idle, total = sum(w.idle_ns for w in workers), sum(w.total_ns for w in workers)
    assert bubble_share(db) == pytest.approx(idle / total, abs=1e-12)
    # Pieces of a gap fill it.
    (pieces,) = db.execute("select sum(dur) from slice where name like 'wait: %'").fetchone()
    assert (pieces or 0) == idle
    (passes,) = db.execute("select count(*) from slice where thread = 'device' and name like 'step %'").fetchone()
    assert passes == len(joined.passes)


def test_an_empty_capture_is_a_trace() -> None:
    assert {event["ph"] for event in events_of(joined_of(SpanTables.of([])))} == {"M"}


def one_request() -> Recorder:
    """A request in two steps, another one beside it, and a step behind them."""
    recorder = Recorder()
    recorder.accept(5, "mine", client_sent_ns=50, received_ns=60, prepared_ns=70, accepted_ns=80)
    recorder.add(RecordKind.TOKENIZED, 0, started_ns=61, ended_ns=69, num_bodies=1)
    recorder.accept(6, "other", client_sent_ns=55, received_ns=82, prepared_ns=84, accepted_ns=86)
    for step_id in range(3):
        start = 1000 * (step_id + 1)
        recorder.one_pass(step_id, list(range(start, start + 220, 10)), num_running=2)
        recorder.add(
            RecordKind.FLUSHED, step_id, started_ns=start + 300, detokenized_ns=start + 310, delivered_ns=start + 320
        )
    recorder.add(RecordKind.REQUEST_ADMITTED, 5, step_id=0, sent_ns=1030)
    recorder.add(
        RecordKind.REQUEST_DONE,
        5,
        client_sent_ns=50,
        received_ns=60,
        prepared_ns=70,
        admitted_ns=1030,
        first_token_ns=1190,
        last_token_ns=2190,
        detokenized_ns=2310,
        delivered_ns=2320,
    )
    return recorder


def test_a_request_is_followed_through_the_processes() -> None:
    joined = joined_of(one_request().tables())
    events = events_of(joined)
    flow = [event for event in events if event.get("cat") == "request" and event["name"] == "mine"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    way = [names[event["pid"]] for event in flow]
    assert way == ["requests", "frontend", "frontend", "worker-0", "output"]
    db = load_slices(events)
    (whole,) = db.execute("select dur from slice where name = 'mine' and depth = 0").fetchone()
    (parts,) = db.execute(
        "select sum(dur) from slice s where depth = 1 and thread = (select thread from slice where name = 'mine')"
    ).fetchone()
    assert whole == parts == 2320 - 50


def test_one_request_alone() -> None:
    joined = only_request(joined_of(one_request().tables()), "mine")
    assert joined.passes["step_id"].tolist() == [0, 1]
    db = load_slices(events_of(joined))
    names = {name for (name,) in db.execute("select name from slice where thread = 'device' and depth = 0")}
    assert names == {"step 0", "idle", "step 1"}
    assert db.execute("select count(*) from slice where process = 'requests' and depth = 0").fetchone() == (1,)
    assert db.execute("select count(*) from slice where thread = 'tokenize'").fetchone() == (1,)
    assert db.execute("select count(*) from slice where name = 'flush'").fetchone() == (2,)


def test_a_request_that_has_not_ended() -> None:
    joined = only_request(joined_of(one_request().tables(), ended_ns=4000), "other")
    assert len(joined.requests) == 0 and joined.unfinished.ids == ["other"]
    db = load_slices(events_of(joined))
    assert db.execute("select dur from slice where name = 'other'").fetchone() == (4000 - 55,)


def test_of_equal_ids_the_newest_counts() -> None:
    recorder = Recorder()
    for key in (1, 2):
        recorder.accept(key, "r1", received_ns=100 * key, prepared_ns=100 * key, accepted_ns=100 * key)
    assert only_request(joined_of(recorder.tables()), "r1").unfinished.keys.tolist() == [2]


def test_a_request_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"--request: no request 'x' in this capture; it has mine, other"):
        only_request(joined_of(one_request().tables()), "x")
    with pytest.raises(ConfigError, match="there is none at all"):
        only_request(joined_of(SpanTables.of([])), "x")


def test_counters_show_changes_only() -> None:
    recorder = Recorder()
    for step_id, free in enumerate([40, 40, 10]):
        start = 1000 * (step_id + 1)
        recorder.one_pass(step_id, list(range(start, start + 220, 10)), num_running=2, num_free_blocks=free)
    db = load_slices(events_of(joined_of(recorder.tables())))

    def series(name: str) -> list[int]:
        return [value for (value,) in db.execute("select value from counter where name = ? order by ts", (name,))]

    assert series("KV blocks in use") == [50 - 40, 50 - 10]  # 100 blocks, two workers
    assert series("requests running") == [2]
    assert series("steps in flight") == [1, 0, 1, 0, 1, 0]
