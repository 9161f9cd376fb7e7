"""From the record of a benchmark run to its figures."""

from __future__ import annotations

import pytest

from procengine.bench_report import report, table
from procengine.bench_run import Record, _may_end
from procengine.messages import Delta, Outputs, Rejected, encode

MS = 1_000_000


def outputs(*deltas: Delta) -> bytes:
    return encode(Outputs(list(deltas)))


RECORD = Record(
    submitted_ns={"a": 0, "b": 10 * MS},
    frames=[
        (20 * MS, outputs(Delta("a", 0, "", [1], prompt_token_ids=[5, 6, 7]))),
        (30 * MS, outputs(Delta("a", 0, "", [2, 3]), Delta("b", 0, "", [4], prompt_token_ids=[8]))),
        (50 * MS, outputs(Delta("b", 0, "", [9], "length"))),
        (100 * MS, outputs(Delta("a", 0, "", [4], "length"))),
    ],
)


def test_figures_follow_from_times_and_counts() -> None:
    figures = report(RECORD, {"num_steps": 4})
    assert figures["wall_s"] == pytest.approx(0.1)
    assert (figures["num_prompt_tokens"], figures["num_output_tokens"]) == (4, 6)
    assert figures["output_tokens_per_s"] == pytest.approx(60)
    assert figures["prompt_tokens_per_s"] == pytest.approx(40)
    assert figures["requests_per_s"] == pytest.approx(20)
    assert figures["ttft_ms"]["mean"] == pytest.approx((20 + 20) / 2)
    assert figures["e2e_ms"]["mean"] == pytest.approx((100 + 40) / 2)
    assert figures["itl_ms"]["mean"] == pytest.approx((10 + 70 + 20) / 3)
    assert figures["tpot_ms"]["mean"] == pytest.approx((80 / 3 + 20) / 2)
    assert figures["num_steps"] == 4


def test_percentiles_of_nothing_are_null() -> None:
    one = Record({"a": 0}, [(5 * MS, outputs(Delta("a", 0, "", [1], "length", prompt_token_ids=[5])))])
    figures = report(one, {})
    assert figures["itl_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99"))
    assert figures["ttft_ms"]["p99"] == pytest.approx(5)


def test_table_has_a_line_a_figure() -> None:
    text = table({**report(RECORD, {}), "config": {"long": "value"}})
    assert "ttft_ms                      mean 20.000  p50 20.000" in text
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
