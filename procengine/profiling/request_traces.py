"""The life of each request as a tree of spans with OpenTelemetry's names. Pure.

Owns: what a trace of a request holds, and the wait until all that belongs to it was read. Never does: send it anywhere
(`otlp`), or say where a stage begins (`requests`).

Attributes follow the semantic conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/); what
they have no name for is under `procengine.`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from procengine.profiling.records import RecordKind
from procengine.profiling.requests import REQUEST_STAGES, Requests, finished_requests
from procengine.profiling.snapshot import SpanTables
from procengine.trace_context import TraceContext

__all__ = ["RequestTrace", "RequestTraces", "TraceSpan"]

_KINDS: Final = (RecordKind.REQUEST_ACCEPTED, RecordKind.REQUEST_TRACED, RecordKind.REQUEST_DONE)
_IN_THE_GROUP: Final = REQUEST_STAGES[1:]  # the way here is the client's span


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A stretch of time with a name. Times are CLOCK_MONOTONIC nanoseconds."""

    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request (one choice of it).

    Attributes:
        root: all of it; `stages` lie in it one after the other, without those that took no time.
        parent: the client's span, if it named one.
        error: what went wrong, "" for nothing.
    """

    root: TraceSpan
    stages: list[TraceSpan]
    attributes: dict[str, Any]
    parent: TraceContext | None = None
    error: str = ""


@dataclass(slots=True)
class RequestTraces:
    """Feed it all tables, oldest first.

    Attributes:
        model: what requests ask for.
        since_ns: requests that ended before it are left out: somebody else has shown them.
    """

    model: str
    since_ns: int = 0
    _newest_key: int = -1
    _kept: SpanTables = field(default_factory=lambda: SpanTables.of([]))

    def add(self, tables: SpanTables) -> list[RequestTrace]:
        """Take in what is new; returns the requests of which all is known now."""
        kept = self._kept.joined(tables)
        accepted, done = kept[RecordKind.REQUEST_ACCEPTED], kept[RecordKind.REQUEST_DONE]
        self._newest_key = max(self._newest_key, int(accepted["key"].max(initial=-1)))
        # The end of a request may be read before its beginning, which then comes with the next read.
        ready = done["key"][done["key"] <= self._newest_key]
        still = {kind: kept[kind].where(~np.isin(kept[kind]["key"], ready)) for kind in _KINDS}
        self._kept = SpanTables({**SpanTables.of([]).tables, **still})
        finished = finished_requests(kept)
        finished = finished.where(np.isin(finished.keys, ready) & (finished.bounds_ns[:, -1] >= self.since_ns))
        parents = _parents(kept)
        return [self._trace(finished, at, parents.get(key)) for at, key in enumerate(finished.keys.tolist())]

    def _trace(self, finished: Requests, at: int, parent: TraceContext | None) -> RequestTrace:
        bounds = finished.bounds_ns[at, 1:].tolist()
        counts = {name: int(values[at]) for name, values in finished.counts.items()}
        reason = finished.finish_reasons[at]
        operation = "embeddings" if reason == "stop" and not counts["num_output_tokens"] else "text_completion"
        stages = _stages(bounds)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "procengine",
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
            "gen_ai.response.id": finished.ids[at],
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.usage.input_tokens": counts["num_prompt_tokens"],
            "gen_ai.usage.output_tokens": counts["num_output_tokens"],
            "gen_ai.usage.cache_read.input_tokens": counts["num_cached_tokens"],
            "procengine.num_preemptions": counts["num_preemptions"],
            "procengine.worker": int(finished.ranks[at]),
        }
        root = TraceSpan(f"{operation} {self.model}", bounds[0], bounds[-1])
        return RequestTrace(root, stages, attributes, parent, reason if reason in ("abort", "error") else "")


def _stages(bounds: Sequence[int]) -> list[TraceSpan]:
    spans = map(TraceSpan, _IN_THE_GROUP, bounds, bounds[1:])
    return [span for span in spans if span.end_ns > span.begin_ns]


def _parents(tables: SpanTables) -> dict[int, TraceContext]:
    """The client's span by request key."""
    rows = tables[RecordKind.REQUEST_TRACED].rows.tolist()
    return {key: TraceContext.from_words((high, low, span, flags)) for key, _, high, low, span, flags in rows}
