"""A collector for traces, on loopback: it keeps what is sent to it as OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

__all__ = ["Collector"]


class Collector:
    """Use it as a context; what came stays afterwards."""

    def __init__(self) -> None:
        collector = self
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                collector.take(self.path, data)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def endpoint(self) -> str:
        """The full URL."""
        return f"{self.base_url}/v1/traces"

    def take(self, path: str, data: bytes) -> None:
        """One export."""
        assert path == "/v1/traces", path
        request = ExportTraceServiceRequest.FromString(data)
        for resource_spans in request.resource_spans:
            self.resource = {pair.key: _value(pair.value) for pair in resource_spans.resource.attributes}
            for scope_spans in resource_spans.scope_spans:
                self.spans += scope_spans.spans

    def named(self, name: str) -> Span:
        """The one span of that name."""
        (found,) = (span for span in self.spans if span.name == name)
        return found

    @staticmethod
    def attributes(span: Span) -> dict[str, Any]:
        """Of a span, as Python's values."""
        return {pair.key: _value(pair.value) for pair in span.attributes}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
