"""From the record of a benchmark run to its figures. Pure: values in, values out.

Owns: what each figure means. Never does: run anything.

ttft: from sending a request to its first tokens. itl: between two messages with tokens of one request. tpot: of one
request, (last tokens - first tokens) / (tokens - 1). e2e: from sending to the last message. All in ms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from procengine.bench_run import Record
from procengine.messages import Delta, Outputs, decode_to_client

__all__ = ["report", "table"]


class _Timeline(msgspec.Struct):
    """One request: when tokens came, and how many there were."""

    submitted_ns: int
    token_times_ns: list[int] = []
    end_ns: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0


def report(record: Record, stats: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a run; `stats` are the group's own, passed through."""
    timelines = _timelines(record)
    begin_ns = min(t.submitted_ns for t in timelines)
    wall_s = (max(t.end_ns for t in timelines) - begin_ns) / 1e9
    num_output = sum(t.num_tokens for t in timelines)
    num_prompt = sum(t.num_prompt_tokens for t in timelines)
    return {
        "num_requests": len(timelines),
        "wall_s": wall_s,
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "output_tokens_per_s": num_output / wall_s,
        "prompt_tokens_per_s": num_prompt / wall_s,
        "requests_per_s": len(timelines) / wall_s,
        **_latencies(timelines),
        **stats,
    }


def table(figures: Mapping[str, Any]) -> str:
    """The figures for people: one line each, percentiles in columns."""
    lines = []
    for name, value in figures.items():
        if name == "config":
            continue
        shown = (
            "  ".join(f"{k} {_number(v)}" for k, v in value.items()) if isinstance(value, Mapping) else _number(value)
        )
        lines.append(f"{name:<28} {shown}")
    return "\n".join(lines)


def _timelines(record: Record) -> list[_Timeline]:
    timelines = {request_id: _Timeline(at) for request_id, at in record.submitted_ns.items()}
    for now_ns, delta in _deltas(record):
        timeline = timelines[delta.request_id]
        if delta.token_ids:
            timeline.token_times_ns.append(now_ns)
            timeline.num_tokens += len(delta.token_ids)
        if delta.prompt_token_ids is not None:
            timeline.num_prompt_tokens = len(delta.prompt_token_ids)
        timeline.end_ns = now_ns
    return list(timelines.values())


def _deltas(record: Record) -> Iterator[tuple[int, Delta]]:
    for now_ns, frame in record.frames:
        message = decode_to_client(frame)
        if isinstance(message, Outputs):
            yield from ((now_ns, item) for item in message.items if isinstance(item, Delta))


def _latencies(timelines: list[_Timeline]) -> dict[str, Any]:
    ttft, itl, tpot, e2e = [], [np.empty(0)], [], []
    for timeline in timelines:
        times = np.array(timeline.token_times_ns, np.int64)
        e2e.append(timeline.end_ns - timeline.submitted_ns)
        if times.size:
            ttft.append(times[0] - timeline.submitted_ns)
            itl.append(np.diff(times))
        if timeline.num_tokens > 1:
            tpot.append((times[-1] - times[0]) / (timeline.num_tokens - 1))
    samples = {
        "ttft_ms": np.array(ttft),
        "itl_ms": np.concatenate(itl),
        "tpot_ms": np.array(tpot),
        "e2e_ms": np.array(e2e),
    }
    return {name: _summary(values / 1e6) for name, values in samples.items()}


def _summary(values: np.ndarray[Any, np.dtype[Any]]) -> dict[str, float | None]:
    """Mean and percentiles; None where there is no sample (an answer of one token has no gap)."""
    if not values.size:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
