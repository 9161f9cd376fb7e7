"""The main figures of a report as PNGs. Needs matplotlib (the extra `plot`).

Owns: how they look. Never does: choose or compute what they show (`report_data`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["can_draw", "draw_figures"]

Data = dict[str, Any]

_DPI: Final = 130
_PHASES: Final = {"stage": "#b9ddb0", "forward": "#4f9a4a", "sample": "#8fcb7f"}
_CAUSES: Final = {
    "no request": "#9aa3ac",
    "tokenize": "#e8a33d",
    "result hop": "#d6604d",
    "decode+apply": "#2b8a94",
    "frontend busy": "#a5813a",
    "schedule": "#3b6fb6",
    "build": "#6c9bd8",
    "encode+send": "#8fb4e3",
    "step hop": "#c96a92",
    "worker queue": "#a56bb5",
}
_REQUEST_STAGES: Final = {
    "submit": "#9aa3ac",
    "tokenize": "#e8a33d",
    "queue": "#d6604d",
    "prefill": "#3b6fb6",
    "decode": "#4f9a4a",
    "detokenize": "#8d6cab",
    "deliver": "#2b8a94",
}
_SLICES: Final = {
    **_PHASES,
    "schedule": "#3b6fb6",
    "build": "#6c9bd8",
    "encode": "#a3c2ea",
    "send": "#aab3bc",
    "send text": "#aab3bc",
    "decode": "#7cc1c7",
    "take tokens": "#7cc1c7",
    "apply": "#2b8a94",
    "copy to host": "#7d8894",
    "detokenize": "#8d6cab",
    "deliver": "#b9a0cf",
    **{f"wait: {cause}": color for cause, color in _CAUSES.items()},
}
_LINES: Final = ("#3b6fb6", "#4f9a4a", "#8d6cab", "#c8553d", "#e8a33d", "#2b8a94")
_SERIES: Final = ("worker busy", "batch rows", "KV blocks in use", "requests waiting")


def can_draw() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError:
        return False
    return True


def draw_figures(data: Data, folder: Path) -> list[Path]:
    """Write workers.png, steps.png, requests.png, latency.png and over_time.png, those of which there is something to
    show. Returns what was written."""
    drawings: dict[str, tuple[Callable[[Figure, Data], None], tuple[float, float], bool]] = {
        "workers": (_draw_workers, (10, 1.6 + 0.5 * len(data["summary"]["workers"])), bool(data["summary"]["workers"])),
        "steps": (_draw_steps, (12, 4), bool(data["windows"])),
        "requests": (_draw_requests, (10, 5), bool(data["requests"]["rows"])),
        "latency": (_draw_latency, (11, 5), any(h["counts"] for h in data["histograms"])),
        "over_time": (_draw_over_time, (11, 5), bool(data["series"]["workers"])),
    }
    written = []
    for name, (draw, size, has_data) in drawings.items():
        if has_data:
            written.append(_save(draw, data, size, folder / f"{name}.png"))
    return written


def _save(draw: Callable[[Figure, Data], None], data: Data, size: tuple[float, float], path: Path) -> Path:
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    figure = Figure(figsize=size, layout="constrained")
    draw(figure, data)
    figure.savefig(path, dpi=_DPI)
    return path


def _draw_workers(figure: Figure, data: Data) -> None:
    axes = figure.subplots()
    workers = data["summary"]["workers"]
    for name, color in (_PHASES | _CAUSES).items():
        of_all = [{**w["busy_share_by_phase"], **w["bubble_share_by_cause"]} for w in workers]
        shares = [100 * shares[name] for shares in of_all]
        before = [100 * sum(list(shares.values())[: list(shares).index(name)]) for shares in of_all]
        label = name if max(shares) >= 0.05 else None
        axes.barh([f"worker-{w['rank']}" for w in workers], shares, left=before, color=color, label=label)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the worker's time; green is work, the rest is waiting")
    axes.legend(ncols=7, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, frameon=False)


def _draw_steps(figure: Figure, data: Data) -> None:
    axes = figure.subplots()
    view = data["windows"][0]
    for row, lane in enumerate(view["lanes"]):
        pieces: dict[tuple[bool, str], list[tuple[float, float]]] = {}
        for at_us, length_us, name, depth in lane["slices"]:
            pieces.setdefault((depth > 0, name if depth else ""), []).append((at_us / 1e3, length_us / 1e3))
        for (is_inner, name), ranges in sorted(pieces.items()):
            height = 0.5 if is_inner else 0.75
            color = _SLICES.get(name, "#d6dbe0")
            axes.broken_barh(ranges, (row - height / 2, height), color=color, label=name if is_inner else None)
    axes.set_yticks(range(len(view["lanes"])), [f"{lane['process']} {lane['thread']}" for lane in view["lanes"]])
    axes.invert_yaxis()
    axes.set_xlim(-0.05 * view["length_us"] / 1e3, 1.05 * view["length_us"] / 1e3)
    axes.set_xlabel("ms")
    axes.set_title(view["title"], fontsize=10)
    _legend_once(axes)


def _legend_once(axes: Axes) -> None:
    """Each name once, beside the picture."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(
        list(unique.values()), list(unique), loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False
    )


def _draw_requests(figure: Figure, data: Data) -> None:
    axes = figure.subplots()
    rows = data["requests"]["rows"]
    at_ms = [request["begin_ms"] for request in rows]
    for number, name in enumerate(data["request_stages"]):
        lengths = [request["stages_ms"][number] for request in rows]
        axes.barh(range(len(rows)), lengths, left=at_ms, height=0.8, color=_REQUEST_STAGES[name], label=name)
        at_ms = [at + length for at, length in zip(at_ms, lengths, strict=True)]
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel("ms")
    axes.set_ylabel("requests, in the order in which they came")
    _legend_once(axes)


def _draw_latency(figure: Figure, data: Data) -> None:
    shown = data["histograms"]
    for axes, one in zip(figure.subplots(2, math.ceil(len(shown) / 2)).flat, shown, strict=False):
        axes.set_title(f"{one['title']}, {'µs' if one['unit'] == 'us' else one['unit']}", fontsize=9)
        axes.tick_params(labelsize=8)
        if one["counts"]:
            axes.stairs(one["counts"], one["edges"], fill=True, color="#6c9bd8")
            axes.set_xscale("log")
            low, high = one["edges"][0], one["edges"][-1]
            ticks = [low, math.sqrt(low * high), high]
            axes.set_xticks(ticks, [f"{tick:,.3g}" if tick < 1000 else f"{tick:,.0f}" for tick in ticks])
            axes.set_xticks([], minor=True)
            for value in (one["p50"], one["p99"]):
                axes.axvline(value, color="#c8553d", linestyle="--", linewidth=1)


def _draw_over_time(figure: Figure, data: Data) -> None:
    series = data["series"]
    for axes, name in zip(figure.subplots(2, 2, sharex=True).flat, _SERIES, strict=True):
        for number, worker in enumerate(series["workers"]):
            values = [math.nan if value is None else value for value in worker[name]]
            color = _LINES[number % len(_LINES)]
            axes.plot(series["times_s"], values, color=color, linewidth=1, label=f"worker-{worker['rank']}")
        axes.set_title(name, fontsize=9)
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.0))
        axes.tick_params(labelsize=8)
    figure.supxlabel("s", fontsize=9)
    if len(series["workers"]) > 1:
        figure.axes[0].legend(fontsize=8, frameon=False)
