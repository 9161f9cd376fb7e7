"""A capture in figures: what `summary.json` holds and the tables show. Pure.

Owns: what each figure means. Never does: draw or print.

Shares are of 0 to 1. Those of a worker are of its time from its first pass to the end of its last; those of a stage
are of the time that all steps took from plan to result. Stages have a path: "loop" is from plan to result, "text" the
way of the same result to the output process and "flush" what that sends to clients; these two come on top.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from procengine.profiling.bubbles import CAUSES, overlap_share
from procengine.profiling.capture import Joined
from procengine.profiling.requests import REQUEST_STAGES, Requests
from procengine.profiling.steps import LOOP_STAGES, TEXT_STAGES, Passes, WorkerTime, worker_times

__all__ = ["PERCENTILES", "summarize"]

PERCENTILES: Final = (50, 90, 99)
_US: Final = 1e3
_MS: Final = 1e6


def summarize(joined: Joined) -> dict[str, Any]:
    """All figures, as JSON can hold them. Of what did not happen there are zeros, empty lists and None."""
    capture, passes = joined.capture, joined.passes
    workers = worker_times(passes)
    known_ns = sum(worker.busy_ns + worker.idle_ns for worker in workers)
    return {
        "group": capture.group.name,
        "model": capture.group.model,
        "seconds": capture.seconds,
        "cut_short": capture.cut_short,
        "restarted": list(capture.restarted),
        "num_lost_records": capture.tables.num_lost,
        "num_steps": int((passes["micro_step"] == 0).sum()),
        "num_passes": len(passes),
        "steps": _steps(passes),
        "bubble_share": sum(worker.idle_ns for worker in workers) / known_ns if known_ns else None,
        "bubble_share_by_cause": {
            cause: ns / known_ns if known_ns else 0.0 for cause, ns in joined.bubbles.ns_by_cause.items()
        },
        "overlap_share": overlap_share(passes),
        "workers": [_worker(worker, joined) for worker in workers],
        "stages": _stages(joined),
        "requests": _requests(joined.requests, len(joined.unfinished)),
        "cpu": {
            name: {"seconds": cpu_s, "share": cpu_s / capture.seconds if capture.seconds else 0.0}
            for name, cpu_s in capture.cpu_s.items()
        },
    }


def _steps(passes: Passes) -> dict[str, Any]:
    firsts = passes.where(passes["micro_step"] == 0)
    run_ns = passes["done_ns"] - passes["started_ns"]
    gap_ns = (passes["started_ns"][1:] - passes["done_ns"][:-1])[passes.follows[1:]]
    return {
        "pass_us": _spread(run_ns / _US),
        "gap_us": _spread(gap_ns / _US),
        "round_trip_us": _spread((firsts["applied_ns"] - firsts["plan_ns"]) / _US),
        "rows": _spread(firsts["num_step_rows"].astype(float)),
        "in_flight": _spread(firsts["num_in_flight"].astype(float)),
    }


def _worker(worker: WorkerTime, joined: Joined) -> dict[str, Any]:
    total_ns = worker.busy_ns + worker.idle_ns
    parts_ns = joined.bubbles.of_rank(worker.rank).ns_by_cause
    spent_ns = {"stage": worker.stage_ns, "forward": worker.forward_ns, "sample": worker.sample_ns}
    return {
        "rank": worker.rank,
        "seconds": worker.total_ns / 1e9,
        "unknown_seconds": worker.unknown_ns / 1e9,
        "num_passes": len(joined.passes.of_rank(worker.rank)),
        "busy_share": worker.busy_ns / total_ns if total_ns else 0.0,
        "bubble_share": worker.bubble_share,
        "busy_share_by_phase": {name: ns / total_ns if total_ns else 0.0 for name, ns in spent_ns.items()},
        "bubble_share_by_cause": {cause: parts_ns[cause] / total_ns if total_ns else 0.0 for cause in CAUSES},
        "overlap_share": overlap_share(joined.passes.of_rank(worker.rank)),
    }


def _stages(joined: Joined) -> list[dict[str, Any]]:
    passes, flushed = joined.passes, joined.flushed
    loop = [(stage.process, stage.name, "loop", passes.durations(stage)) for stage in LOOP_STAGES]
    text = [(stage.process, stage.name, "text", passes.durations(stage)) for stage in TEXT_STAGES]
    flush = [
        ("output", name, "flush", flushed[end] - flushed[begin])
        for name, begin, end in (
            ("detokenize", "started_ns", "detokenized_ns"),
            ("deliver", "detokenized_ns", "delivered_ns"),
        )
    ]
    whole_ns = sum(int(durations.sum()) for *_, durations in loop)
    return [_stage(*each, whole_ns) for each in (*loop, *text, *flush)]


def _stage(process: str, name: str, path: str, durations: NDArray[np.int64], whole_ns: int) -> dict[str, Any]:
    return {
        "process": process,
        "stage": name,
        "path": path,
        "us": _spread(durations / _US),
        "share": int(durations.sum()) / whole_ns if whole_ns else 0.0,
    }


def _requests(requests: Requests, num_unfinished: int) -> dict[str, Any]:
    bounds, tokens = requests.bounds_ns, requests.counts["num_output_tokens"]
    stages_ns, e2e_ns = requests.stages_ns, requests.e2e_ns
    whole_ns = int(e2e_ns.sum())
    has_token, has_gap = tokens > 0, tokens > 1
    decode_ns = bounds[:, 5] - bounds[:, 4]
    return {
        "num_ended": len(requests),
        "num_unfinished": num_unfinished,
        "finish_reasons": dict(Counter(requests.finish_reasons)),
        "num_prompt_tokens": int(requests.counts["num_prompt_tokens"].sum()),
        "num_cached_tokens": int(requests.counts["num_cached_tokens"].sum()),
        "num_output_tokens": int(tokens.sum()),
        "num_preemptions": int(requests.counts["num_preemptions"].sum()),
        "e2e_ms": _spread(e2e_ns / _MS),
        "ttft_ms": _spread((bounds[:, 4] - bounds[:, 0])[has_token] / _MS),
        "tpot_ms": _spread(decode_ns[has_gap] / (tokens[has_gap] - 1) / _MS),
        "stages": {
            name: {
                "ms": _spread(stages_ns[:, at] / _MS),
                "share": int(stages_ns[:, at].sum()) / whole_ns if whole_ns else 0.0,
            }
            for at, name in enumerate(REQUEST_STAGES)
        },
    }


def _spread(values: NDArray[Any]) -> dict[str, Any]:
    """How many, mean, percentiles and the largest; None where there is no sample."""
    names = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    if not values.size:
        return {"num": 0, **dict.fromkeys(names)}
    figures = [values.mean(), *np.percentile(values, PERCENTILES), values.max()]
    return {"num": int(values.size), **{name: float(figure) for name, figure in zip(names, figures, strict=True)}}
