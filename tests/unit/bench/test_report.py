"""From the record of a run to its figures, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from procengine.bench.goodput import meets, parse_objectives
from procengine.bench.record import Record
from procengine.bench.report import ReportOptions, report, samples_ms, summary, table
from procengine.bench.run import _may_end
from procengine.bench.timelines import Timeline, read_timelines
from procengine.errors import ConfigError, ProcengineError
from procengine.messages import Delta, Outputs, Rejected, encode

MS = 1_000_000


def outputs(*deltas: Delta) -> bytes:
    return encode(Outputs(list(deltas)))


RECORD = Record(
    intended_ns={"a": 0, "b": 10 * MS},
    submitted_ns={"a": 0, "b": 10 * MS},
    frames=[
        (20 * MS, outputs(Delta("a", 0, "", [1], prompt_token_ids=[5, 6, 7], num_cached_tokens=2))),
        (30 * MS, outputs(Delta("a", 0, "", [2, 3]), Delta("b", 0, "", [4], prompt_token_ids=[8]))),
        (50 * MS, outputs(Delta("b", 0, "", [9], "length"))),
        (100 * MS, outputs(Delta("a", 0, "", [4], "length"))),
    ],
    failures={},
)


def figures_of(record: Record, **options: Any) -> dict[str, Any]:
    return report(read_timelines(record), {}, ReportOptions(**options))


def test_figures_follow_from_times_and_counts() -> None:
    figures = report(read_timelines(RECORD), {"num_steps": 4})
    assert (figures["num_requests"], figures["num_failed"], figures["peak_concurrency"]) == (2, 0, 2)
    assert figures["wall_s"] == pytest.approx(0.1)
    assert (figures["num_prompt_tokens"], figures["num_cached_tokens"], figures["num_output_tokens"]) == (4, 2, 6)
    assert figures["output_tokens_per_s"] == pytest.approx(60)
    assert figures["prompt_tokens_per_s"] == pytest.approx(40)
    assert figures["requests_per_s"] == pytest.approx(20)
    assert figures["ttft_ms"]["mean"] == pytest.approx((20 + 20) / 2)
    assert figures["e2el_ms"]["mean"] == pytest.approx((100 + 40) / 2)
    assert figures["itl_ms"]["mean"] == pytest.approx((10 + 70 + 20) / 3)
    assert figures["itl_ms"]["p50"] == pytest.approx(20)
    assert figures["tpot_ms"]["mean"] == pytest.approx((80 / 3 + 20) / 2)
    assert figures["num_steps"] == 4
    assert "lateness_ms" not in figures and "goodput" not in figures


def test_a_request_that_was_sent_late_counts_from_when_it_was_due() -> None:
    late = RECORD._replace(intended_ns={"a": -40 * MS, "b": 2 * MS})
    figures = figures_of(late, has_schedule=True)
    assert figures["ttft_ms"]["mean"] == pytest.approx((60 + 28) / 2)
    assert figures["e2el_ms"]["mean"] == pytest.approx((140 + 48) / 2)
    assert figures["wall_s"] == pytest.approx(0.14)
    assert figures["lateness_ms"] == {
        "mean": pytest.approx(24),
        "p50": pytest.approx(24),
        "p99": pytest.approx(39.68),
        "max": 40,
    }
    assert figures["itl_ms"] == figures_of(RECORD)["itl_ms"], "gaps do not depend on it"


def test_percentiles_of_nothing_are_null() -> None:
    one = Record({"a": 0}, {"a": 0}, [(5 * MS, outputs(Delta("a", 0, "", [1], "length", prompt_token_ids=[5])))], {})
    figures = figures_of(one)
    assert figures["itl_ms"] == figures["tpot_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99"))
    assert figures["ttft_ms"]["p99"] == pytest.approx(5)


def test_metrics_and_percentiles_are_those_asked_for() -> None:
    figures = figures_of(RECORD, metrics=("ttft",), percentiles=(99.9, 5))
    assert list(figures["ttft_ms"]) == ["mean", "p5", "p50", "p99.9"]
    assert not {"itl_ms", "tpot_ms", "e2el_ms"} & set(figures)
    assert summary(np.array([1.0, 2.0, 3.0, 4.0]), (25, 100)) == {"mean": 2.5, "p25": 1.75, "p50": 2.5, "max": 4.0}


def test_failed_requests_are_counted_and_nothing_else() -> None:
    record = RECORD._replace(failures={"b": "queue is full"})
    figures = figures_of(record, objectives={"ttft": 1000.0})
    assert (figures["num_requests"], figures["num_failed"], figures["errors"]) == (2, 1, ["queue is full"])
    assert figures["num_output_tokens"] == 4 and figures["requests_per_s"] == pytest.approx(10)
    assert figures["e2el_ms"]["p50"] == figures["e2el_ms"]["p99"] == pytest.approx(100)
    assert figures["goodput"]["share"] == 0.5
    assert "failed: queue is full" in table(figures)
    with pytest.raises(ProcengineError, match="all 2 requests of the benchmark failed; the first: x"):
        figures_of(RECORD._replace(failures={"a": "x", "b": "y"}))


@pytest.mark.parametrize(
    ("objectives", "share"),
    [
        ({"ttft": 20.0}, 1.0),  # at the limit is within it
        ({"ttft": 19.9}, 0.0),
        ({"tpot": 21.0}, 0.5),  # a: 26.7, b: 20
        ({"e2el": 50.0}, 0.5),
        ({"tpot": 30.0, "e2el": 50.0}, 0.5),
        ({"tpot": 21.0, "e2el": 39.0}, 0.0),
    ],
)
def test_goodput_is_what_meets_all_objectives(objectives: dict[str, float], share: float) -> None:
    goodput = figures_of(RECORD, objectives=objectives)["goodput"]
    assert goodput["share"] == share and goodput["requests_per_s"] == pytest.approx(share * 2 / 0.1)


def test_answer_of_one_token_cannot_be_slow_between_tokens_and_one_of_none_is_not_good() -> None:
    assert meets(Timeline(0, 0, [5 * MS], [1], 5 * MS), {"tpot": 0.001})
    assert not meets(Timeline(0, 0, [], [], 5 * MS), {"tpot": 1.0})


def test_objectives_are_read_as_vllm_writes_them() -> None:
    assert parse_objectives(["ttft:200", "tpot:0.5", "e2el:1e4"]) == {"ttft": 200.0, "tpot": 0.5, "e2el": 10_000.0}
    assert parse_objectives([]) == {}


@pytest.mark.parametrize("text", ["ttft", "itl:5", "ttft=5", ":5"])
def test_unknown_objective_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput: must be METRIC:MS with one of ttft, tpot, e2el, got '{text}'"):
        parse_objectives([text])


@pytest.mark.parametrize("value", ["", "x", "0", "-1", "nan", "inf"])
def test_objective_without_a_positive_limit_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput: the limit must be a positive .* got 'tpot:{value}'"):
        parse_objectives([f"tpot:{value}"])
    with pytest.raises(ConfigError, match="ttft is given twice"):
        parse_objectives(["ttft:1", "ttft:2"])


def test_peak_concurrency_counts_what_is_under_way_at_once() -> None:
    spans = [(0, 10), (5, 20), (10, 30), (40, 50)]  # one that ends as another begins makes room for it
    timelines = [Timeline(begin, begin, [end], [1], end) for begin, end in spans]
    assert report(timelines, {})["peak_concurrency"] == 2


def test_samples_are_in_the_order_of_the_requests() -> None:
    timelines = read_timelines(RECORD)
    assert samples_ms(timelines, "e2el").tolist() == [100, 40]
    assert samples_ms(timelines, "itl").tolist() == [10, 70, 20]


def test_options_that_make_no_sense_are_named() -> None:
    with pytest.raises(ConfigError, match="--percentile-metrics: 'tps' is none of ttft, itl, tpot, e2el"):
        ReportOptions(metrics=("tps",))
    with pytest.raises(ConfigError, match="--metric-percentiles: must be between 0 and 100, got 101"):
        ReportOptions(percentiles=(101,))


def test_table_has_a_line_a_figure() -> None:
    text = table({**figures_of(RECORD), "config": {"long": "value"}, "max_concurrency": None, "request_rate": "inf"})
    assert "ttft_ms                      mean 20.000  p50 20.000" in text
    assert "max_concurrency              -\nrequest_rate                 inf" in text
    assert "config" not in text


@pytest.mark.parametrize(
    ("frame", "may_end"),
    [
        (outputs(Delta("a", 0, "some text", [1])), False),
        (outputs(Delta("a", 0, "", [1]), Delta("b", 0, "", [1], "length")), True),
        (outputs(Delta("a", 0, "", [1], "stop")), True),
        (outputs(Delta("a", 0, "", [1], "abort")), True),
        (outputs(Delta("a", 0, "", [1], "error", error="x")), True),
        (outputs(Delta("a", 0, "stop", [1])), True),  # looks like it: read to be sure
        (encode(Rejected("a", "overloaded", "full")), True),
    ],
)
def test_message_without_a_finish_reason_need_not_be_read_at_once(frame: bytes, may_end: bool) -> None:
    assert _may_end(frame) is may_end
