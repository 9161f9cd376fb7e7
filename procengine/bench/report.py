"""From the timelines of a benchmark run to its figures. Pure: values in, values out.

Owns: what each figure means. Never does: run anything.

ttft: from the intended time of a request to its first tokens. itl: between two messages with tokens of one request.
tpot: of one request, (last tokens - first tokens) / (tokens - 1). e2el: from the intended time to the last message. The
intended time is the planned arrival where there is a plan, else the time of sending. All in ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.bench.goodput import meets
from procengine.bench.latency_metrics import LATENCY_METRICS
from procengine.bench.timelines import Timeline
from procengine.errors import ConfigError, ProcengineError

__all__ = ["ReportOptions", "report", "samples_ms", "summary", "table"]

_NOT_SHOWN = frozenset({"config", "errors"})


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What a report holds beside counts and rates.

    Attributes:
        metrics: of `LATENCY_METRICS`.
        percentiles: of each metric, beside mean and median (p50); 0 to 100.
        objectives: milliseconds by metric, for goodput; empty is no goodput.
        has_schedule: whether requests had planned arrivals, so that they can have been sent late.
    """

    metrics: Sequence[str] = LATENCY_METRICS
    percentiles: Sequence[float] = (90.0, 99.0)
    objectives: Mapping[str, float] = field(default_factory=dict)
    has_schedule: bool = False

    def __post_init__(self) -> None:
        for metric in self.metrics:
            if metric not in LATENCY_METRICS:
                raise ConfigError(f"--percentile-metrics: {metric!r} is none of {', '.join(LATENCY_METRICS)}")
        for percentile in self.percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(f"--metric-percentiles: must be between 0 and 100, got {percentile:g}")


def report(
    timelines: Sequence[Timeline], stats: Mapping[str, Any], options: ReportOptions | None = None
) -> dict[str, Any]:
    """All figures of a run; `stats` are the group's own, passed through. A failed request counts as that, nowhere else.

    Raises:
        ProcengineError: no request came to its end.
    """
    options = options or ReportOptions()
    done = [timeline for timeline in timelines if timeline.error is None]
    errors = [timeline.error for timeline in timelines if timeline.error is not None]
    if not done:
        raise ProcengineError(f"all {len(errors)} requests of the benchmark failed; the first: {errors[0]}")
    wall_s = (max(t.end_ns for t in done) - min(t.intended_ns for t in timelines)) / 1e9
    num_output = sum(t.num_tokens for t in done)
    num_prompt = sum(t.num_prompt_tokens for t in done)
    figures: dict[str, Any] = {
        "num_requests": len(timelines),
        "num_failed": len(errors),
        "wall_s": wall_s,
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": sum(t.num_cached_tokens for t in done),
        "num_output_tokens": num_output,
        "output_tokens_per_s": num_output / wall_s,
        "prompt_tokens_per_s": num_prompt / wall_s,
        "requests_per_s": len(done) / wall_s,
        "peak_concurrency": _peak_concurrency(done),
    }
    for metric in options.metrics:
        figures[f"{metric}_ms"] = summary(samples_ms(done, metric), options.percentiles)
    if options.has_schedule:
        figures["lateness_ms"] = summary(samples_ms(done, "lateness"), (99.0, 100.0))
    if options.objectives:
        figures["goodput"] = _goodput(timelines, options.objectives, wall_s)
    if errors:
        figures["errors"] = sorted(set(errors))
    return figures | dict(stats)


def samples_ms(timelines: Sequence[Timeline], metric: str) -> NDArray[np.float64]:
    """float64 [samples] of `ttft`, `itl`, `tpot`, `e2el` or `lateness`; a request without the figure gives none."""
    if metric == "itl":
        return np.concatenate([np.empty(0), *(t.itl_ms for t in timelines)])
    values = [getattr(t, f"{metric}_ms") for t in timelines]
    return np.array([value for value in values if value is not None], np.float64)


def summary(values: NDArray[np.float64], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and percentiles; None where there is no sample (an answer of one token has no gap)."""
    asked = sorted({50.0, *percentiles})
    names = [f"p{percentile:g}" if percentile < 100 else "max" for percentile in asked]
    if not values.size:
        return dict.fromkeys(("mean", *names))
    found = np.percentile(values, asked).tolist()
    return {"mean": float(values.mean()), **dict(zip(names, found, strict=True))}


def table(figures: Mapping[str, Any]) -> str:
    """The figures for people: one line each, percentiles in columns."""
    lines = []
    for name, value in figures.items():
        if name not in _NOT_SHOWN:
            is_map = isinstance(value, Mapping)
            shown = "  ".join(f"{k} {_number(v)}" for k, v in value.items()) if is_map else _number(value)
            lines.append(f"{name:<28} {shown}")
    lines += [f"failed: {error}" for error in figures.get("errors", ())]
    return "\n".join(lines)


def _goodput(timelines: Sequence[Timeline], objectives: Mapping[str, float], wall_s: float) -> dict[str, float]:
    num_good = sum(meets(timeline, objectives) for timeline in timelines)
    limits = {f"{metric}_limit_ms": limit for metric, limit in objectives.items()}
    return {"share": num_good / len(timelines), "requests_per_s": num_good / wall_s, **limits}


def _peak_concurrency(timelines: Sequence[Timeline]) -> int:
    """Most requests under way at one time, from sending to the last message."""
    begins = np.sort([t.submitted_ns for t in timelines])
    ends = np.sort([t.end_ns for t in timelines])
    ended_before = np.searchsorted(ends, begins, side="right")  # one that ends as another begins makes room for it
    return int((np.arange(1, begins.size + 1) - ended_before).max())


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
