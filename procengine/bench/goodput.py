"""Goodput: the requests that were served as fast as they should be. Pure.

Owns: the objectives and who meets them. DistServe (Zhong et al., 2024, arXiv:2401.09670) gives the definition: requests
a second that meet *all* objectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from procengine.bench.latency_metrics import GOODPUT_METRICS
from procengine.bench.timelines import Timeline
from procengine.errors import ConfigError

__all__ = ["meets", "parse_objectives"]


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "tpot:50"]` as milliseconds by metric.

    Raises:
        ConfigError: a metric is unknown or given twice, or its limit is no positive number.
    """
    objectives: dict[str, float] = {}
    for text in texts:
        metric, colon, value = text.partition(":")
        if not colon or metric not in GOODPUT_METRICS:
            raise ConfigError(f"--goodput: must be METRIC:MS with one of {', '.join(GOODPUT_METRICS)}, got {text!r}")
        if metric in objectives:
            raise ConfigError(f"--goodput: {metric} is given twice")
        objectives[metric] = _limit(text, value)
    return objectives


def _limit(text: str, value: str) -> float:
    try:
        limit_ms = float(value)
    except ValueError:
        limit_ms = math.nan
    if not 0 < limit_ms < math.inf:
        raise ConfigError(f"--goodput: the limit must be a positive number of milliseconds, got {text!r}")
    return limit_ms


def meets(timeline: Timeline, objectives: Mapping[str, float]) -> bool:
    """Whether a request meets all objectives. One that failed, or brought no token, meets none; an answer of one token
    has no time per token that could be too long."""
    if timeline.error is not None or not timeline.num_tokens:
        return False
    values = {"ttft": timeline.ttft_ms, "tpot": timeline.tpot_ms, "e2el": timeline.e2el_ms}
    return all((value := values[metric]) is None or value <= limit for metric, limit in objectives.items())
