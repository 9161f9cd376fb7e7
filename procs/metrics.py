"""The metrics process: reads what the others write anyway, and shows it to Prometheus, OpenTelemetry and the web page.

Wiring only. No other process waits for it or sends it anything, but for the supervisor's status once a second. If it
dies, the group goes on and the supervisor starts it again; its counters then begin with what the span rings still hold.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from procengine import ipc
from procengine.child import Child, run_child
from procengine.config import EngineConfig
from procengine.errors import ConfigError
from procengine.groups import describe
from procengine.health import group_health
from procengine.messages import (
    Adapters,
    ChangeAdapter,
    ChildStats,
    Drain,
    FrontendLost,
    GetStatus,
    Leave,
    OutputLost,
    Query,
    RetireWorker,
    Shutdown,
    Status,
    TakeRecord,
    WorkerLost,
    decode_from_supervisor,
    decode_status,
    encode,
)
from procengine.profiling.exposition import CONTENT_TYPE, render
from procengine.profiling.group_totals import GroupTotals
from procengine.profiling.metric_families import GroupFacts, families_of
from procengine.profiling.metrics_http import Page, serve_pages
from procengine.profiling.process_watch import process_name
from procengine.profiling.recent_frames import RecentFrames
from procengine.profiling.request_traces import RequestTrace, RequestTraces
from procengine.profiling.snapshot import SpanReader

__all__ = ["main"]

_PERIOD_S = 1.0  # the rings hold far more than a second brings
_STALE_S = 5.0
_NICENESS = 15  # when cores are scarce, who only watches comes last


class _Exporter(Protocol):
    def send(self, traces: list[RequestTrace], wall_offset_ns: int) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """The counters, and what reads for them. `update` and the pages may be called from any thread."""

    def __init__(self, child: Child, exporter: _Exporter | None) -> None:
        self._config = child.config
        self._reader = SpanReader(os.getppid())
        self._totals = GroupTotals(child.config.worker.num_workers)
        self._traces = RequestTraces(child.config.model.name, since_ns=time.monotonic_ns())
        self._exporter = exporter
        self._lock = threading.Lock()
        self._frames = RecentFrames(os.getppid())
        self._status: Status | None = None
        self._num_blocks = 0
        self._status_ns = time.monotonic_ns()

    def update(self) -> None:
        """Take in what is new in the rings."""
        with self._lock:
            tables = self._reader.read()
            self._totals.add_tables(tables)
            if self._exporter is not None:
                self._exporter.send(self._traces.add(tables), time.time_ns() - time.monotonic_ns())

    def take_status(self, data: bytes) -> None:
        """The supervisor has answered."""
        with self._lock:
            self._status_ns = time.monotonic_ns()
            self._status = decode_status(data)
            self._totals.add_status(self._status, self._status_ns)

    def metrics_page(self) -> Page:
        """All metrics, up to this moment."""
        self.update()
        constant = {"group": self._config.group.name, "model_name": self._config.model.name}
        with self._lock:
            families = families_of(self._totals, self._facts(), time.monotonic_ns())
            return Page(HTTPStatus.OK, CONTENT_TYPE, render(families, constant))

    def top_page(self) -> Page:
        """What `procengine top --json` prints."""
        self.update()
        info = describe(Path(self._config.group.run_dir))
        if info is None:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", "the group is still starting\n")
        with self._lock:
            frame = self._frames.frame(info, self._totals)
        return Page(HTTPStatus.OK, "application/json", msgspec.json.encode(frame).decode() + "\n")

    def health_page(self) -> Page:
        """200 if the group serves and gets on with it, 503 if not."""
        with self._lock:
            answer = self._status
            is_stale = time.monotonic_ns() - self._status_ns > _STALE_S * 1e9
        processes = [] if answer is None else answer.processes
        is_well = answer is not None and group_health(answer).is_healthy and not is_stale
        states = {process_name(process): process.state for process in processes}
        about: dict[str, Any] = {"status": "ok" if is_well else "unwell", "processes": states}
        if is_stale:
            about["error"] = "the supervisor does not answer"
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        return Page(status, "application/json", json.dumps(about) + "\n")

    def _facts(self) -> GroupFacts:
        if not self._num_blocks:  # known when the workers are up, and written down then
            described = describe(Path(self._config.group.run_dir))
            has_cache = "generate" in self._config.model.workflows
            self._num_blocks = described.num_blocks if described and has_cache else 0
        return GroupFacts(self._num_blocks, _cache_labels(self._config))


def _cache_labels(config: EngineConfig) -> dict[str, str]:
    return {
        "block_size": str(config.cache.block_size),
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "cache_dtype": config.worker.kv_cache_dtype,
        "device": config.worker.device,
    }


def main(child: Child) -> None:
    """Serve until the supervisor says stop or is gone."""
    os.nice(_NICENESS)
    exporter = _open_exporter(child)
    metrics = Metrics(child, exporter)
    if child.listen_fd is not None:
        pages = {"/metrics": metrics.metrics_page, "/health": metrics.health_page, "/top": metrics.top_page}
        serve_pages(child.listen_fd, pages)
    child.say_ready({})
    _watch(child, metrics)
    if exporter is not None:
        metrics.update()
        exporter.close()
    child.context.destroy(linger=1000)


def _open_exporter(child: Child) -> _Exporter | None:
    endpoint = child.config.metrics.otlp_endpoint
    if endpoint is None:
        return None
    try:
        from procengine.profiling.otlp import TraceExporter
    except ImportError as error:
        raise ConfigError(f"otlp_endpoint: needs `pip install procengine[otel]` ({error})") from error
    return TraceExporter(endpoint, child.config.group.name)


def _watch(child: Child, metrics: Metrics) -> None:
    """Read and ask once a period, answer the supervisor at once."""
    status = ipc.connect(child.context, zmq.DEALER, child.endpoint("control"))
    poller = zmq.Poller()
    for socket in (child.control, status):
        poller.register(socket, zmq.POLLIN)
    poller.register(child.death_fd, select.POLLIN)
    next_s = time.monotonic()
    is_asked = False
    while True:
        ready = dict(poller.poll(max(0, int(1e3 * (next_s - time.monotonic())) + 1)))
        if child.death_fd in ready:
            os._exit(1)
        if status in ready:
            metrics.take_status(status.recv())
            is_asked = False
        if child.control in ready and not _obey(child):
            return
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _PERIOD_S
            metrics.update()
            if not is_asked:
                status.send(encode(GetStatus()))
                is_asked = True


def _obey(child: Child) -> bool:
    """Do what the supervisor says. False: end."""
    match decode_from_supervisor(child.control.recv()):
        case Query(query_id):
            child.control.send(encode(ChildStats(query_id, "ready", 0)))
        case Shutdown():
            return False
        case (
            Drain()
            | Leave()
            | WorkerLost()
            | RetireWorker()
            | OutputLost()
            | FrontendLost()
            | TakeRecord()
            | ChangeAdapter()
            | Adapters()
        ):  # these are the business of others
            pass
    return True


if __name__ == "__main__":
    run_child("metrics", main)
