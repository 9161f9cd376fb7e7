"""The life of a request as a tree of spans."""

from __future__ import annotations

import random

import pytest

from procengine.profiling.records import FINISH_CODES, RecordKind
from procengine.profiling.request_traces import RequestTrace, RequestTraces, TraceSpan
from procengine.trace_context import TraceContext
from tests.unit.profiling.synthetic import Recorder

PARENT = TraceContext(2**127 + 5, 2**63 + 9, 1)
TIMES = {
    "client_sent_ns": 90,
    "received_ns": 100,
    "prepared_ns": 110,
    "admitted_ns": 130,
    "first_token_ns": 160,
    "last_token_ns": 200,
    "detokenized_ns": 210,
    "delivered_ns": 230,
}


def trace_parent(recorder: Recorder, key: int) -> None:
    high, low, span, flags = PARENT.to_words()
    recorder.add(
        RecordKind.REQUEST_TRACED,
        key,
        trace_id_high=high,
        trace_id_low=low,
        parent_span_id=span,
        trace_flags=flags,
    )


def end(recorder: Recorder, key: int, reason: str = "length", num_output_tokens: int = 5, **times: int) -> None:
    counts = {"num_prompt_tokens": 12, "num_cached_tokens": 8, "num_preemptions": 1}
    code = FINISH_CODES.index(reason)
    recorder.add(
        RecordKind.REQUEST_DONE, key, **(TIMES | times), **counts, num_output_tokens=num_output_tokens, finish_code=code
    )


def one(fill_end: dict[str, object] | None = None, *, is_traced: bool = True) -> RequestTrace:
    recorder = Recorder()
    if is_traced:
        trace_parent(recorder, 3)
    recorder.accept(3, "r-3", rank=1)
    end(recorder, 3, **(fill_end or {}))  # type: ignore[arg-type]
    (found,) = RequestTraces("m").add(recorder.tables())
    return found


def test_a_request_and_its_stages() -> None:
    found = one()
    assert found.root == TraceSpan("text_completion m", 100, 230)
    assert found.stages == [
        TraceSpan("tokenize", 100, 110),
        TraceSpan("queue", 110, 130),
        TraceSpan("prefill", 130, 160),
        TraceSpan("decode", 160, 200),
        TraceSpan("detokenize", 200, 210),
        TraceSpan("deliver", 210, 230),
    ]
    assert found.parent == PARENT and found.error == ""
    assert found.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "procengine",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "r-3",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "procengine.num_preemptions": 1,
        "procengine.worker": 1,
    }


def test_without_a_parent_it_is_a_trace_of_its_own() -> None:
    assert one(is_traced=False).parent is None


def test_a_vector_is_an_embedding() -> None:
    found = one({"reason": "stop", "num_output_tokens": 0})
    assert found.attributes["gen_ai.operation.name"] == "embeddings" and found.root.name == "embeddings m"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_did_not_happen_has_no_span(reason: str) -> None:
    nothing = dict.fromkeys(("admitted_ns", "first_token_ns", "last_token_ns"), 0)
    found = one({"reason": reason, "num_output_tokens": 0, **nothing})
    assert found.error == reason
    assert [span.name for span in found.stages] == ["tokenize", "detokenize", "deliver"]
    assert (found.root.begin_ns, found.root.end_ns) == (100, 230)


@pytest.mark.parametrize("seed", range(10))
def test_each_request_comes_once_however_it_was_read(seed: int) -> None:
    draw = random.Random(seed)
    frontend, output = list(range(30)), list(range(30))
    traces, found = RequestTraces("m"), []
    while frontend or output:
        recorder = Recorder()
        for _ in range(min(draw.randint(0, 4), len(frontend))):
            key = frontend.pop(0)
            if key % 3 == 0:
                trace_parent(recorder, key)
            recorder.accept(key, f"r{key}", rank=0)
        for _ in range(min(draw.randint(0, 4), len(output))):
            end(recorder, output.pop(0))
        found += traces.add(recorder.tables())
    found += traces.add(Recorder().tables())
    assert sorted(one.attributes["gen_ai.response.id"] for one in found) == sorted(f"r{key}" for key in range(30))
    has_parent = {one.attributes["gen_ai.response.id"] for one in found if one.parent}
    assert has_parent == {f"r{key}" for key in range(0, 30, 3)}
    assert all(len(table) == 0 for table in traces._kept.tables.values())


def test_what_another_process_has_shown_is_not_shown_again() -> None:
    recorder = Recorder()
    for key, delivered_ns in enumerate((300, 400)):
        recorder.accept(key, f"r{key}")
        end(recorder, key, delivered_ns=delivered_ns)
    traces = RequestTraces("m", since_ns=350)
    assert [one.root.end_ns for one in traces.add(recorder.tables())] == [400]
    assert traces.add(Recorder().tables()) == []


def test_a_request_from_before_is_shown_without_its_id() -> None:
    recorder = Recorder()
    recorder.accept(9, "r9")
    end(recorder, 2)
    (found,) = RequestTraces("m").add(recorder.tables())
    assert found.attributes["gen_ai.response.id"] == "" and found.attributes["procengine.worker"] == -1
