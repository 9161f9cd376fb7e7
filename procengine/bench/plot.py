"""A run as a picture: latency distributions and the course of the run. Needs matplotlib (the extra `plot`).

Owns: how it looks. Never does: compute (`plot_data`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from procengine.bench.plot_data import bin_edges, cumulative, histogram, over_time
from procengine.bench.report import samples_ms
from procengine.bench.timelines import Timeline
from procengine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_can_plot", "plot_run"]

_NUM_BINS: Final = 60
_TITLES: Final = {"ttft": "time to first token", "e2el": "end to end", "itl": "between tokens", "tpot": "per token"}
_BLUE, _ORANGE = "#3267a8", "#d9822b"


def check_can_plot(path: Path) -> None:
    """Say before a long run that its picture cannot be made.

    Raises:
        ConfigError: matplotlib is missing, the file is no .png, or its folder does not exist.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot: must be a .png file, got {path}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent} to write {path.name} to")
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib; pip install 'procengine[plot]'") from error


def plot_run(timelines: Sequence[Timeline], title: str, path: Path) -> None:
    """Draw the completed requests of a run into a PNG file."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    done = [timeline for timeline in timelines if timeline.error is None]
    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    for axis, metric in zip(axes[0], ("ttft", "e2el"), strict=True):
        _draw_cumulative(axis, done, metric)
    _draw_histogram(axes[1][0], done)
    _draw_course(axes[1][1], done)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error.strerror}") from error


def _draw_cumulative(axis: Axes, timelines: Sequence[Timeline], metric: str) -> None:
    values, shares = cumulative(samples_ms(timelines, metric))
    axis.step(values, shares, where="post", color=_BLUE)
    for share in (0.5, 0.99):
        if values.size:
            at_ms = float(np.percentile(values, 100 * share))
            axis.axvline(at_ms, color=_ORANGE, linewidth=1, linestyle="--" if share == 0.5 else ":")
            shown = f"{at_ms:,.0f}" if at_ms >= 100 else f"{at_ms:.3g}"
            axis.annotate(f"p{share * 100:.0f} {shown} ms", (at_ms, 0.04), rotation=90, ha="right", fontsize=8)
    axis.set(title=f"{metric.upper()}: {_TITLES[metric]}", xlabel="ms", ylabel="share of requests", ylim=(0, 1.02))
    axis.grid(alpha=0.3)


def _draw_histogram(axis: Axes, timelines: Sequence[Timeline]) -> None:
    samples = {metric: samples_ms(timelines, metric) for metric in ("itl", "tpot")}
    edges = bin_edges(list(samples.values()), _NUM_BINS)
    for (metric, values), color in zip(samples.items(), (_BLUE, _ORANGE), strict=True):
        if values.size:
            label = f"{metric.upper()}: {_TITLES[metric]}"
            axis.stairs(histogram(values, edges), edges, fill=True, alpha=0.6, color=color, label=label)
    axis.set(title="ITL and TPOT (the last bar holds the slowest 0.5 % too)", xlabel="ms", ylabel="share of samples")
    axis.grid(alpha=0.3)
    if axis.patches:
        axis.legend()


def _draw_course(axis: Axes, timelines: Sequence[Timeline]) -> None:
    course = over_time(timelines, _NUM_BINS)
    axis.stairs(course.tokens_per_s, course.edges_s, fill=True, alpha=0.6, color=_BLUE)
    axis.set(title="the run", xlabel="seconds", ylabel="output tokens/s")
    axis.yaxis.label.set_color(_BLUE)
    axis.grid(alpha=0.3)
    running = axis.twinx()
    running.stairs(course.num_running, course.edges_s, color=_ORANGE, linewidth=1.5)
    running.set_ylabel("requests under way", color=_ORANGE)
    running.set_ylim(bottom=0)
