"""Figures of a capture, and what a report shows of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procengine.profiling.bubbles import CAUSES
from procengine.profiling.capture import Capture, GroupFacts, Joined, join_capture
from procengine.profiling.records import RecordKind
from procengine.profiling.report_data import report_data
from procengine.profiling.snapshot import SpanTables
from procengine.profiling.summary import summarize
from procengine.profiling.summary_text import summary_text
from tests.unit.profiling.synthetic import Recorder, random_run

MS = 10**6


def joined_of(tables: SpanTables, **facts: Any) -> Joined:
    group = GroupFacts("g", "m", {"supervisor": 1, "worker-0": 2, "frontend": 3, "output": 4}, 100)
    return join_capture(Capture(group, 0, 2 * 10**9, tables, {"frontend": 0.5}, **facts))


def by_hand() -> Joined:
    """Two steps of a worker that waits for the second, and two requests."""
    recorder = Recorder()
    #          plan ... sent     step at the worker   pass                 result          applied        output
    times = [0, 10, 20, 30, 40, 50, 60, 100, 110, 170, 190, 200, 210, 220, 230, 240, 250, 260, 300, 260, 270, 280]
    recorder.one_pass(0, [1000 + t for t in times], num_rows=4)
    recorder.one_pass(1, [1300 + t for t in times], num_rows=4)
    recorder.add(RecordKind.FLUSHED, 0, started_ns=1290, detokenized_ns=1293, delivered_ns=1300)
    for key, first in ((1, 10), (2, 30)):
        times_ms = (0, 1, 3, 6, first + 10, first + 50, first + 55, first + 61)
        names = (
            "client_sent",
            "received",
            "prepared",
            "admitted",
            "first_token",
            "last_token",
            "detokenized",
            "delivered",
        )
        recorder.add(
            RecordKind.REQUEST_DONE,
            key,
            **{f"{name}_ns": (1 + ms) * MS for name, ms in zip(names, times_ms, strict=True)},
            num_output_tokens=5,
            num_prompt_tokens=7,
            finish_code=2,
        )
    return joined_of(recorder.tables())


def test_figures_by_hand() -> None:
    summary = summarize(by_hand())
    assert (summary["num_steps"], summary["num_passes"]) == (2, 2)
    (worker,) = summary["workers"]
    # Passes last 90 (10 + 60 + 20); between them the worker waits from 1190 to 1400.
    assert worker["busy_share_by_phase"] == {"stage": 20 / 390, "forward": 120 / 390, "sample": 40 / 390}
    assert worker["bubble_share"] == summary["bubble_share"] == pytest.approx(210 / 390)
    causes = {cause: share for cause, share in worker["bubble_share_by_cause"].items() if share}
    assert {cause: round(390 * share) for cause, share in causes.items()} == {
        "result hop": 60,
        "decode+apply": 50,
        "schedule": 10,
        "build": 10,
        "encode+send": 20,
        "step hop": 10,
        "worker queue": 50,
    }
    assert summary["overlap_share"] == 0  # the second step was planned while the worker had nothing
    stages = {(stage["process"], stage["stage"]): stage for stage in summary["stages"]}
    assert stages["frontend", "apply"]["us"]["p50"] == pytest.approx(0.04)
    assert sum(stage["share"] for stage in summary["stages"] if stage["path"] == "loop") == pytest.approx(1)
    assert stages["output", "deliver"]["us"]["max"] == pytest.approx(0.007)
    requests = summary["requests"]
    assert (requests["num_ended"], requests["finish_reasons"]) == (2, {"length": 2})
    assert requests["ttft_ms"]["max"] == pytest.approx(40)
    assert requests["tpot_ms"]["mean"] == pytest.approx(10)
    assert requests["stages"]["decode"]["ms"]["mean"] == pytest.approx(40)
    assert sum(stage["share"] for stage in requests["stages"].values()) == pytest.approx(1)
    assert summary["cpu"]["frontend"] == {"seconds": 0.5, "share": 0.25}


def test_tables_name_what_the_worker_waited_for() -> None:
    text = summary_text(summarize(by_hand()))
    lines = text.splitlines()
    assert lines[0].startswith("group g, m: 2.0 s, 2 steps, 2 passes, 2 requests ended")
    assert "worker-0: busy 46.2 % (stage 5.1 %, forward 30.8 %, sample 10.3 %), waiting 53.8 %" in lines
    waits = [line.split("%")[1].split("  ")[1] for line in lines if line.startswith("   ") and "%" in line]
    assert waits[0] == "result hop"  # the largest first
    assert "no request" not in text  # what did not happen has no line
    assert any(line.startswith("decode") and "40.00" in line for line in lines)


def test_a_summary_of_nothing_says_so() -> None:
    joined = joined_of(SpanTables.of([], num_lost=3), cut_short="it ended")
    summary = summarize(joined)
    assert summary["bubble_share"] is None and summary["num_lost_records"] == 3 and summary["cut_short"] == "it ended"
    text = summary_text(summary)
    assert "no forward pass in this time" in text and "3 records were lost" in text
    data = report_data(joined, summary)
    assert msgspec.json.decode(msgspec.json.encode(data))["windows"] == []


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_shares_add_up_and_are_json(seed: int) -> None:
    joined = joined_of(random_run(seed))
    summary = summarize(joined)
    for worker in summary["workers"]:
        shares = [*worker["busy_share_by_phase"].values(), *worker["bubble_share_by_cause"].values()]
        assert sum(shares) == pytest.approx(1)
        assert sum(worker["busy_share_by_phase"].values()) == pytest.approx(worker["busy_share"])
    assert set(summary["bubble_share_by_cause"]) == set(CAUSES)
    assert sum(summary["bubble_share_by_cause"].values()) == pytest.approx(summary["bubble_share"])
    data = report_data(joined, summary)
    assert msgspec.json.decode(msgspec.json.encode(summary)) == summary
    for view in data["windows"]:
        assert any(lane["thread"] == "device" and lane["slices"] for lane in view["lanes"])
        assert all(0 <= a < len(view["lanes"]) and 0 <= b < len(view["lanes"]) for a, _, b, _ in view["arrows"])
    for one in data["histograms"]:
        assert len(one["edges"]) == len(one["counts"]) + bool(one["counts"])
    for worker in data["series"]["workers"]:
        assert {len(values) for name, values in worker.items() if name != "rank"} == {len(data["series"]["times_s"])}


def test_a_report_shows_the_passes_of_a_request() -> None:
    recorder = Recorder()
    for step_id in range(3):
        start = 1000 * (step_id + 1)
        recorder.one_pass(step_id, list(range(start, start + 220, 10)))
    recorder.accept(5, "mine", received_ns=60, prepared_ns=70, accepted_ns=80)
    recorder.add(
        RecordKind.REQUEST_DONE,
        5,
        received_ns=60,
        admitted_ns=1030,
        last_token_ns=2190,
        delivered_ns=2400,
        finish_code=1,
    )
    data = report_data(joined := joined_of(recorder.tables()), summarize(joined))
    (row,) = data["requests"]["rows"]
    assert (row["id"], row["num_passes"], data["requests"]["typical"], data["requests"]["slowest"]) == ("mine", 2, 0, 0)
    assert sum(row["stages_ms"]) == pytest.approx((2400 - 60) / 1e6)


def test_requests_that_ended_before_do_not_count() -> None:
    """Their records may be written after the capture began."""
    tables = by_hand().capture.tables  # the requests were delivered at 72 and 92 ms
    assert len(joined_of(tables, since_ns=80 * MS).requests) == 1
    assert summarize(joined_of(tables, since_ns=93 * MS))["requests"]["num_ended"] == 0
