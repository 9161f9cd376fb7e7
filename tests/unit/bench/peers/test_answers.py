"""What engines say: figures of good answers, errors for the others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from procengine.bench.peers.answers import EngineError, Ran, Ready, encode_load, figures_of, read_answer
from procengine.bench.peers.loads import Load

LOAD = Load([[1, 2, 3], [4, 5]], output_len=3, is_streaming=True)


def ran(*requests: dict[str, Any]) -> Ran:
    answer = read_answer(json.dumps({"kind": "ran", "requests": requests}).encode())
    assert isinstance(answer, Ran)
    return answer


def times(*token_times_s: float, counts: list[int] | None = None, sent_s: float = 0.0, due_s: float = 0.0) -> Any:
    counts = counts or [1] * len(token_times_s)
    return {"intended_s": due_s, "submitted_s": sent_s, "token_times_s": token_times_s, "token_counts": counts}


def test_load_goes_out_as_one_line_of_plain_json() -> None:
    load = Load([[1, 2], [3]], 4, False, 16, np.array([0.0, 0.5]))
    assert json.loads(encode_load(load)) == {
        "prompts": [[1, 2], [3]],
        "output_len": 4,
        "is_streaming": False,
        "max_concurrency": 16,
        "arrivals_s": [0.0, 0.5],
    }
    assert json.loads(encode_load(LOAD))["arrivals_s"] is None and b"\n" not in encode_load(load)


def test_figures_of_a_streamed_run() -> None:
    figures = figures_of(LOAD, ran(times(0.5, 0.6, 0.7), times(1.0, 1.1, 1.2)))
    assert figures["wall_s"] == pytest.approx(1.2)
    assert figures["output_tokens_per_s"] == pytest.approx(6 / 1.2)
    assert figures["prompt_tokens_per_s"] == pytest.approx(5 / 1.2)
    assert figures["decode_tokens_per_s"] == pytest.approx(10.0), "0.1 s a token after the first"
    assert figures["ttft_ms"]["p50"] == pytest.approx(750)
    assert figures["itl_ms"]["p99"] == pytest.approx(100)


def test_run_without_streaming_has_rates_alone() -> None:
    figures = figures_of(LOAD, ran(times(2.0, counts=[3]), times(2.0, counts=[3])))
    assert figures["output_tokens_per_s"] == pytest.approx(3.0)
    assert figures["itl_ms"]["p50"] is None and figures["decode_tokens_per_s"] is None


def test_latency_counts_from_the_planned_arrival() -> None:
    load = Load([[1]], 1, True, None, np.array([0.25]))
    figures = figures_of(load, ran(times(1.0, sent_s=0.75, due_s=0.25)))
    assert figures["ttft_ms"]["p50"] == pytest.approx(750) and figures["lateness_ms"]["p50"] == pytest.approx(500)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([times(1, 2, 3)], "1 requests were answered, 2"),
        ([times(1, 2, 3), times(1, 2)], "request 1 has 2 tokens at 2 times, 3 were asked for"),
        ([times(1, 2, 3, 4), times(1, 2, 3)], "request 0 has 4 tokens"),
        ([times(1, 2, counts=[3]), times(1, 2, 3)], "request 0 has 3 tokens at 2 times"),
        ([times(1, 3, 2), times(1, 2, 3)], "request 0: its times do not ascend"),
        ([times(1, 2, 3), times(1, 2, 3, sent_s=2)], "request 1: its times do not ascend"),
        ([times(1, 2, 3, due_s=1), times(1, 2, 3)], "request 0: its times do not ascend"),
    ],
)
def test_engine_that_did_not_do_what_it_was_asked_is_an_error(requests: list[Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        figures_of(LOAD, ran(*requests))


def test_answers_are_told_apart() -> None:
    assert read_answer(b'{"kind": "ready", "version": "1.2", "precision": "int8"}') == Ready("1.2", "int8")
    with pytest.raises(EngineError, match="out of luck"):
        read_answer(b'{"kind": "failed", "error": "out of luck"}')
    for line in (b"Loading weights ...", b'{"kind": "ran"}', b'{"requests": []}', b'{"kind": "ran", "requests": [1]}'):
        with pytest.raises(EngineError, match="not an answer"):
            read_answer(line)
