"""What the figures of a report show: chosen, cut and counted, ready to draw. Pure.

Owns: which steps and requests stand for all, and how much of each is shown. Never does: draw (`report.html`,
`figures`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from procengine.profiling.bubbles import CAUSE_HELP, busy_until
from procengine.profiling.capture import Joined, only_passes
from procengine.profiling.chrome_trace import trace_events
from procengine.profiling.requests import REQUEST_STAGES, Requests
from procengine.profiling.steps import Passes

__all__ = ["report_data"]

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

_TYPICAL_PASSES: Final = 8
_PASSES_AROUND: Final = 2  # of a gap or a pass that is shown for itself
_MOST_REQUESTS: Final = 80
_MOST_TICKS: Final = 300
_NUM_BINS: Final = 40
_NUM_TIME_BINS: Final = 200


def report_data(joined: Joined, summary: dict[str, Any]) -> dict[str, Any]:
    """Everything a report shows, as JSON can hold it."""
    return {
        "summary": summary,
        "causes": CAUSE_HELP,
        "request_stages": REQUEST_STAGES,
        "windows": _windows(joined),
        "requests": _requests(joined),
        "histograms": _histograms(joined),
        "series": _series(joined),
    }


# --- a few steps, drawn out


def _windows(joined: Joined) -> list[dict[str, Any]]:
    """Stretches of a few passes of the worker that ran most: usual ones, and what stands out."""
    passes = joined.passes
    if not len(passes):
        return []
    rank = max(passes.ranks, key=lambda each: int((passes["rank"] == each).sum()))
    own = passes.of_rank(rank)
    run_ns = own["done_ns"] - own["started_ns"]
    slowest = int(run_ns.argmax())
    chosen = [
        ("usual steps", *_typical(own)),
        (f"the slowest pass, {run_ns[slowest] / 1e6:.2f} ms", *_around(own, slowest)),
    ]
    gaps_ns = np.where(own.follows, own["started_ns"] - np.roll(own["done_ns"], 1), 0)
    longest = int(gaps_ns.argmax())
    if gaps_ns[longest] > 0:
        title = f"the longest gap, {gaps_ns[longest] / 1e6:.2f} ms"
        chosen.append((title, max(longest - _PASSES_AROUND, 0), min(longest + 1, len(own) - 1)))
    return [
        {"title": title, **_window(joined, int(own["started_ns"][first]), int(own["done_ns"][last]))}
        for title, first, last in chosen
    ]


def _typical(own: Passes) -> tuple[int, int]:
    """First and last of some passes in a row that together take the median time."""
    count = min(_TYPICAL_PASSES, len(own))
    lengths = own["done_ns"][count - 1 :] - own["started_ns"][: len(own) - count + 1]
    first = int(np.argsort(lengths, kind="stable")[lengths.size // 2])
    return first, first + count - 1


def _around(own: Passes, at: int) -> tuple[int, int]:
    return max(at - _PASSES_AROUND, 0), min(at + _PASSES_AROUND, len(own) - 1)


def _window(joined: Joined, began_ns: int, ended_ns: int) -> dict[str, Any]:
    """Lanes with slices [begin, length, name, depth], us from `began_ns`, and arrows [lane, time, lane, time]."""
    passes = joined.passes
    shown = only_passes(joined, (passes["done_ns"] >= began_ns) & (passes["started_ns"] <= ended_ns))
    events = trace_events(shown, began_ns)
    names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    lanes: dict[tuple[int, int], dict[str, Any]] = {}
    for (kind, pid, tid), name in names.items():
        process = names["process_name", pid, 0]
        if kind == "thread_name" and process != "requests" and name not in ("steps", "tokenize"):
            lanes[pid, tid] = {"process": process, "thread": name, "slices": []}
    numbers = {track: number for number, track in enumerate(lanes)}
    arrows: dict[Any, list[list[float]]] = {}
    open_until: dict[tuple[int, int], list[float]] = {track: [] for track in lanes}
    for event in events:
        track = (event["pid"], event["tid"])
        if track not in lanes:
            continue
        at_us = event["ts"]
        if event["ph"] == "X":
            stack = open_until[track]
            while stack and stack[-1] <= event["ts"] + 1e-4:
                stack.pop()
            lanes[track]["slices"].append([at_us, event["dur"], event["name"], len(stack)])
            stack.append(event["ts"] + event["dur"])
        elif event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append([numbers[track], at_us])
    return {
        "length_us": (ended_ns - began_ns) / 1e3,
        "lanes": list(lanes.values()),
        "arrows": [a + b for chain in arrows.values() for a, b in pairwise(chain)],
    }


# --- requests


def _requests(joined: Joined) -> dict[str, Any]:
    """Some requests in the order in which they came, the slowest one and one of median length among them."""
    requests = joined.requests
    if not len(requests):
        return {"rows": [], "typical": None, "slowest": None}
    by_length = np.argsort(requests.e2e_ns, kind="stable")
    typical, slowest = int(by_length[len(by_length) // 2]), int(by_length[-1])
    every = np.linspace(0, len(requests) - 1, min(_MOST_REQUESTS, len(requests))).astype(int).tolist()
    shown = sorted({*every, typical, slowest}, key=lambda at: int(requests.bounds_ns[at, 0]))
    first_ns = int(requests.bounds_ns[shown, 0].min())
    return {
        "rows": [_request(requests, at, first_ns, joined.passes) for at in shown],
        "typical": shown.index(typical),
        "slowest": shown.index(slowest),
        "num_all": len(requests),
    }


def _request(requests: Requests, at: int, first_ns: int, passes: Passes) -> dict[str, Any]:
    bounds = requests.bounds_ns[at]
    ran = (
        (passes["rank"] == requests.ranks[at])
        & (passes["encoded_ns"] >= bounds[3])
        & (passes["text_received_ns"] <= bounds[5])
    )
    rows = np.flatnonzero(ran)[:_MOST_TICKS]
    return {
        "id": requests.ids[at] or f"request {requests.keys[at]}",
        "begin_ms": (int(bounds[0]) - first_ns) / 1e6,
        "stages_ms": (requests.stages_ns[at] / 1e6).tolist(),
        "num_prompt_tokens": int(requests.counts["num_prompt_tokens"][at]),
        "num_cached_tokens": int(requests.counts["num_cached_tokens"][at]),
        "num_output_tokens": int(requests.counts["num_output_tokens"][at]),
        "num_preemptions": int(requests.counts["num_preemptions"][at]),
        "finish_reason": requests.finish_reasons[at],
        "num_passes": int(ran.sum()),
        "passes_ms": np.stack(
            ((passes["started_ns"][rows] - bounds[0]) / 1e6, (passes["done_ns"] - passes["started_ns"])[rows] / 1e6),
            axis=1,
        )
        .round(4)
        .tolist(),
    }


# --- distributions


def _histograms(joined: Joined) -> list[dict[str, Any]]:
    passes, requests = joined.passes, joined.requests
    bounds, tokens = requests.bounds_ns, requests.counts["num_output_tokens"]
    has_token, has_gap = tokens > 0, tokens > 1
    tpot_ns = (bounds[:, 5] - bounds[:, 4])[has_gap] / (tokens[has_gap] - 1)
    gaps_ns = joined.bubbles.durations_ns
    samples: list[tuple[str, str, Floats | Int64s]] = [
        ("time to first token", "ms", (bounds[:, 4] - bounds[:, 0])[has_token] / 1e6),
        ("time per token after it", "ms", tpot_ns / 1e6),
        ("whole request", "ms", requests.e2e_ns / 1e6),
        ("forward pass", "us", (passes["done_ns"] - passes["started_ns"]) / 1e3),
        ("gap between passes", "us", gaps_ns[gaps_ns > 0] / 1e3),
        ("result back at the frontend", "us", (passes["result_received_ns"] - passes["done_ns"]) / 1e3),
    ]
    return [{"title": title, "unit": unit, **_histogram(np.asarray(values))} for title, unit, values in samples]


def _histogram(values: Floats) -> dict[str, Any]:
    """Counts in bins that are equally wide on a logarithmic scale."""
    values = values[values > 0]
    if not values.size:
        return {"edges": [], "counts": [], "p50": None, "p99": None}
    low, high = float(values.min()), float(values.max())
    edges = np.geomspace(low * 0.98, high * 1.02, _NUM_BINS + 1)
    counts, _ = np.histogram(values, edges)
    p50, p99 = np.percentile(values, [50, 99])
    return {"edges": edges.tolist(), "counts": counts.tolist(), "p50": float(p50), "p99": float(p99)}


# --- over time


def _series(joined: Joined) -> dict[str, Any]:
    """Means in equal stretches of time, by worker; None where no step was sent."""
    passes, group = joined.passes, joined.capture.group
    if not len(passes):
        return {"times_s": [], "workers": []}
    began, ended = int(passes["plan_ns"].min()), int(passes["done_ns"].max())
    edges = np.linspace(began, ended, min(_NUM_TIME_BINS, max(len(passes) // 4, 2)) + 1)
    return {
        "times_s": ((edges[:-1] - began) / 1e9).round(5).tolist(),
        "num_blocks": group.num_blocks // max(group.num_workers, 1),
        "workers": [_worker_series(passes.of_rank(rank), edges, joined) for rank in passes.ranks],
    }


def _worker_series(own: Passes, edges: Floats, joined: Joined) -> dict[str, Any]:
    group = joined.capture.group
    steps = own.where(own["micro_step"] == 0)
    num_blocks = group.num_blocks // max(group.num_workers, 1) or int(own["num_free_blocks"].max())
    watched_ns = np.diff(np.clip(edges, own["started_ns"][0], own["done_ns"][-1]))
    busy_ns = np.diff(busy_until(own, edges.astype(np.int64)))
    busy = [
        round(min(busy / whole, 1.0), 4) if whole > 0 else None
        for busy, whole in zip(busy_ns.tolist(), watched_ns.tolist(), strict=True)
    ]
    return {
        "rank": int(own["rank"][0]),
        "batch rows": _means(steps["sent_ns"], steps["num_step_rows"], edges),
        "requests running": _means(steps["sent_ns"], steps["num_running"], edges),
        "requests waiting": _means(steps["sent_ns"], steps["num_waiting"], edges),
        "steps in flight": _means(steps["sent_ns"], steps["num_in_flight"], edges),
        "KV blocks in use": _means(steps["sent_ns"], num_blocks - steps["num_free_blocks"], edges),
        "worker busy": busy,
    }


def _means(times_ns: Int64s, values: Int64s, edges: Floats) -> list[float | None]:
    counts, _ = np.histogram(times_ns, edges)
    sums, _ = np.histogram(times_ns, edges, weights=values.astype(float))
    return [
        round(total / count, 3) if count else None for total, count in zip(sums.tolist(), counts.tolist(), strict=True)
    ]
