"""`TraceExporter`: sends traces of requests to a collector, as OTLP over HTTP.

Owns: the OpenTelemetry SDK, which batches, retries and reads the OTEL_* variables that its users know. Never does: know
what is in a trace. Needs the extra `otel`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import procengine
from procengine.profiling.request_traces import RequestTrace
from procengine.trace_context import TraceContext

__all__ = ["TraceExporter"]

_CLOSE_WAIT_S: Final = 2.0  # a collector that does not answer must not hold up the end of the group


class TraceExporter:
    """Traces go to `endpoint`, a full URL, from a thread of the SDK's. `group` tells groups of one service apart."""

    def __init__(self, endpoint: str, group: str, close_wait_s: float = _CLOSE_WAIT_S) -> None:
        self._close_wait_s = close_wait_s
        resource = Resource.create({"service.name": "procengine", "service.instance.id": group})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("procengine", procengine.__version__)

    def send(self, traces: Iterable[RequestTrace], wall_offset_ns: int) -> None:
        """Queue traces. `wall_offset_ns` is what to add to CLOCK_MONOTONIC to get the time of day.

        A client that does not sample its own span gets none of ours either (the SDK's default sampler).
        """
        for one in traces:
            root = self._tracer.start_span(
                one.root.name,
                _context_of(one.parent),
                SpanKind.SERVER,
                one.attributes,
                start_time=one.root.begin_ns + wall_offset_ns,
            )
            inside = trace.set_span_in_context(root)
            for stage in one.stages:
                span = self._tracer.start_span(stage.name, inside, start_time=stage.begin_ns + wall_offset_ns)
                span.end(stage.end_ns + wall_offset_ns)
            if one.error:
                root.set_attribute("error.type", one.error)
                root.set_status(Status(StatusCode.ERROR))
            root.end(one.root.end_ns + wall_offset_ns)

    def close(self) -> None:
        """Send what is queued, for as long as there is time."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(self._close_wait_s)


def _context_of(parent: TraceContext | None) -> Context:
    """Never the current context: there is none that would mean anything here."""
    if parent is None:
        return Context()
    remote = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(parent.flags))
    return trace.set_span_in_context(NonRecordingSpan(remote), Context())
