"""The picture of `scripts/bench scaling`: one panel by batch size, one by context length. Needs matplotlib.

Owns: how it looks. Never does: measure or compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS: Final = {"4-bit": "#3267a8", "int8": "#d9822b", "bf16": "#4c9a5b"}
_MARKERS: Final = ("o", "s", "^")
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "scaling",
    "font.size": 9,
}  # text as text, the same each time


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw `rows` (those of the JSON file) into an SVG file: the least that a step took solid, its bound dashed."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 5.4), layout="constrained")
        figure.suptitle(title)
        by_batch, by_context = figure.subplots(1, 2)
        _draw_panel(by_batch, [row for row in rows if row["sweep"] == "batch"], "batch_size")
        _draw_panel(by_context, [row for row in rows if row["sweep"] == "context"], "context_len")
        by_batch.set(title="by requests in the batch", xlabel="requests")
        by_context.set(title="by tokens before the new one", xlabel="context, tokens")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_panel(axis: Axes, rows: Sequence[Mapping[str, Any]], x: str) -> None:
    batch_sizes = sorted({row["batch_size"] for row in rows}) if x == "context_len" else []
    for name, color in _COLORS.items():
        for number, batch_size in enumerate(batch_sizes or [None]):
            line = [row for row in rows if row["format"] == name and batch_size in (None, row["batch_size"])]
            line.sort(key=lambda row: int(row[x]))
            label = name if batch_size is None else f"{name}, {batch_size} request{'s' * (batch_size > 1)}"
            places = [row[x] for row in line]
            least = [row["least_pass_ms"] for row in line]
            axis.plot(places, least, color=color, marker=_MARKERS[number], ms=4, label=label)
            axis.plot(places, [row["bound_ms"] for row in line], color=color, linestyle="--", linewidth=1)
    axis.plot([], [], color="gray", linestyle="--", linewidth=1, label="bound: memory or arithmetic")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylabel("ms a step")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else ""))
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
