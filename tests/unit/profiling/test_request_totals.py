"""Latencies of requests that ended, and how they ended."""

from __future__ import annotations

import numpy as np
import pytest

from procengine.profiling.records import FINISH_CODES, RecordKind
from procengine.profiling.request_totals import RequestTotals, latencies
from procengine.profiling.requests import finished_requests
from tests.unit.profiling.synthetic import Recorder

MS = 10**6
TIMES = {
    "client_sent_ns": 100 * MS,
    "received_ns": 101 * MS,
    "prepared_ns": 103 * MS,
    "admitted_ns": 107 * MS,
    "first_token_ns": 120 * MS,
    "last_token_ns": 180 * MS,
    "detokenized_ns": 181 * MS,
    "delivered_ns": 182 * MS,
}


def end(recorder: Recorder, key: int, reason: str, num_output_tokens: int = 4, **times: int) -> None:
    recorder.add(
        RecordKind.REQUEST_DONE,
        key,
        **(TIMES | times),
        num_prompt_tokens=30,
        num_output_tokens=num_output_tokens,
        finish_code=FINISH_CODES.index(reason),
    )


def test_latencies_of_one_request() -> None:
    recorder = Recorder()
    end(recorder, 0, "length")
    found = {name: values.tolist() for name, values in latencies(finished_requests(recorder.tables())).items()}
    assert found == {
        "time_to_first_token": [0.020],
        "time_per_output_token": [0.020],
        "e2e": [0.082],
        "queue": [0.004],
        "prefill": [0.013],
        "decode": [0.060],
        "inference": [0.073],
        "tokenize": [0.002],
        "detokenize": [0.001],
    }


def test_times_are_of_complete_requests_and_reasons_of_all() -> None:
    recorder = Recorder()
    end(recorder, 0, "length")
    end(recorder, 1, "stop", num_output_tokens=1)
    end(recorder, 2, "stop", num_output_tokens=0)  # a vector: it has no tokens
    end(recorder, 3, "abort", num_output_tokens=0, first_token_ns=0, last_token_ns=0)
    end(recorder, 4, "error")
    for step in range(3):
        recorder.add(RecordKind.RESULT_APPLIED, step, num_rows=9, num_tokens=7)
    totals = RequestTotals()
    totals.add(recorder.tables())
    assert totals.num_by_reason == {"stop": 2, "length": 1, "abort": 1, "error": 1}
    assert {name: histogram.count for name, histogram in totals.seconds.items()} == {
        "time_to_first_token": 2,
        "time_per_output_token": 1,
        "e2e": 3,
        "queue": 3,
        "prefill": 3,
        "decode": 2,
        "inference": 3,
        "tokenize": 3,
        "detokenize": 3,
    }
    assert (totals.prompt_tokens.count, totals.prompt_tokens.sum) == (3, 90)
    assert totals.output_tokens.sum == 5
    assert totals.num_output_tokens == 21


def test_stages_of_a_request_add_up() -> None:
    recorder = Recorder()
    rng = np.random.default_rng(1)
    for key in range(50):
        times = np.cumsum(rng.integers(1, 10**7, len(TIMES)))
        end(recorder, key, "stop", **dict(zip(TIMES, times.tolist(), strict=True)))
    totals = RequestTotals()
    totals.add(recorder.tables())
    parts = ("queue", "prefill", "decode")
    after_tokenizing = sum(totals.seconds[name].sum for name in parts)
    assert after_tokenizing == pytest.approx(totals.seconds["queue"].sum + totals.seconds["inference"].sum)
