"""Traces as a collector gets them: OTLP over HTTP, to a collector of this test's own."""

from __future__ import annotations

import time

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from procengine.profiling.otlp import TraceExporter
from procengine.profiling.request_traces import RequestTrace, TraceSpan
from procengine.trace_context import TraceContext
from tests.otlp_collector import Collector

PARENT = TraceContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, 1)
OFFSET = 10**18


def request_trace(parent: TraceContext | None = None, error: str = "") -> RequestTrace:
    stages = [TraceSpan("prefill", 100, 160), TraceSpan("decode", 160, 200)]
    attributes = {"gen_ai.usage.output_tokens": 5, "gen_ai.response.finish_reasons": ("length",)}
    return RequestTrace(TraceSpan("text_completion m", 100, 200), stages, attributes, parent, error)


def sent(*traces: RequestTrace) -> Collector:
    with Collector() as collector:
        exporter = TraceExporter(collector.endpoint, "g")
        exporter.send(traces, OFFSET)
        exporter.close()
    return collector


def test_a_tree_with_times_of_day_inside_the_clients_span() -> None:
    collector = sent(request_trace(PARENT))
    root, prefill, decode = (collector.named(name) for name in ("text_completion m", "prefill", "decode"))
    assert {span.trace_id for span in collector.spans} == {PARENT.trace_id.to_bytes(16, "big")}
    assert root.parent_span_id == PARENT.span_id.to_bytes(8, "big")
    assert prefill.parent_span_id == decode.parent_span_id == root.span_id
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (OFFSET + 100, OFFSET + 200)
    assert (decode.start_time_unix_nano, decode.end_time_unix_nano) == (OFFSET + 160, OFFSET + 200)
    assert root.kind == Span.SPAN_KIND_SERVER
    assert collector.attributes(root) == {"gen_ai.usage.output_tokens": 5, "gen_ai.response.finish_reasons": ["length"]}
    assert collector.resource["service.name"] == "procengine" and collector.resource["service.instance.id"] == "g"


def test_requests_without_a_parent_are_traces_of_their_own() -> None:
    collector = sent(request_trace(), request_trace())
    roots = [span for span in collector.spans if span.name == "text_completion m"]
    assert len(roots) == 2 and all(not root.parent_span_id for root in roots)
    assert len({root.trace_id for root in roots}) == 2


def test_an_error_is_one() -> None:
    collector = sent(request_trace(error="abort"))
    root = collector.named("text_completion m")
    assert root.status.code == 2 and collector.attributes(root)["error.type"] == "abort"


def test_who_does_not_sample_gets_no_spans() -> None:
    unsampled = TraceContext(PARENT.trace_id, PARENT.span_id, 0)
    assert [span.name for span in sent(request_trace(unsampled), request_trace(PARENT)).spans].count("decode") == 1


def test_a_collector_that_is_gone_does_not_hold_us_up() -> None:
    with Collector() as collector:
        pass
    exporter = TraceExporter(collector.endpoint, "g", close_wait_s=0.1)
    exporter.send([request_trace()], OFFSET)
    started_s = time.monotonic()
    exporter.close()
    assert time.monotonic() - started_s < 5  # the SDK alone would try for longer
