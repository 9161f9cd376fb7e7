"""How `procengine top` looks: a frame of figures becomes something that Rich can draw, at any width.

Owns: layout, colours, units. Never does: measure, or touch the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from procengine.cli.ps import duration
from procengine.profiling.group_frame import Frame, ProcessLine, WorkerLoad
from procengine.profiling.window import Percentiles, WindowFigures, WorkerShare

__all__ = ["draw", "draw_waiting", "sparkline"]

_SPARKS: Final = "▁▂▃▄▅▆▇█"
_NARROW: Final = 76  # columns below which panels stand one above the other
_MIN_SPARK: Final = 4
_SILENT_S: Final = 3.0
_BUSY, _BUBBLE, _IDLE = "green", "red", "bright_black"
_DIM, _BOLD, _TITLE = "bright_black", "bold", "bold cyan"


def draw(frame: Frame, history: Sequence[float], width: int, *, is_live: bool) -> RenderableType:
    """A whole screen. `history` are rates of output tokens, oldest first; `width` is the terminal's."""
    left = _panel("throughput", _throughput(frame, history, width))
    right = _panel("latency, ms", _latency(frame.window))
    parts: list[RenderableType] = [_header(frame, is_live=is_live)]
    parts += [left, right] if width < _NARROW else [_side_by_side(left, right)]
    parts += [_panel("workers", _workers(frame, width)), _panel("processes", _processes(frame.processes))]
    return Group(*parts)


def draw_waiting(reason: str, was: str | None) -> RenderableType:
    """A screen while there is no group to show. `was` is the group that has ended."""
    lines = [Text("waiting for group", style=_TITLE), Text(reason, style=_DIM)]
    if was:
        lines.insert(0, Text(f"group {was} has ended", style="yellow"))
    return Group(_panel("procengine top", Group(*lines)), Text(" q quit", style=_DIM))


def sparkline(values: Sequence[float]) -> str:
    """One character a value, the largest of them full height."""
    top = max(values, default=0.0)
    if top <= 0:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round(value / top * (len(_SPARKS) - 1))] for value in values)


def _panel(title: str, inside: RenderableType) -> Panel:
    return Panel(inside, title=Text(title, style=_TITLE), title_align="left", box=box.ROUNDED, border_style=_DIM)


def _side_by_side(left: RenderableType, right: RenderableType) -> Table:
    table = Table.grid(expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(left, right)
    return table


def _header(frame: Frame, *, is_live: bool) -> Table:
    text = Text(" ")
    text.append(frame.group, style="bold green")
    text.append(f"  {frame.model.rstrip('/').rpartition('/')[2]}  ", style=_BOLD)  # of a path, the name
    text.append(f"up {duration(frame.uptime_s)}   last {frame.window.seconds:.3g} s", style=_DIM)
    if frame.num_lost_records:
        text.append(f"   {frame.num_lost_records} records lost", style="yellow")
    heard_s = frame.processes[0].heartbeat_age_s if frame.processes else None
    if heard_s is not None and heard_s > _SILENT_S:
        text.append(f"   supervisor silent for {heard_s:.0f} s", style="bold red")
    header = Table.grid(expand=True)
    header.add_column(ratio=1, no_wrap=True)
    header.add_column(justify="right", no_wrap=True)
    header.add_row(text, Text("q quit " if is_live else "", style=_DIM))
    return header


def _throughput(frame: Frame, history: Sequence[float], width: int) -> Table:
    window = frame.window
    num_running = sum(worker.num_running for worker in frame.workers)
    num_waiting = sum(worker.num_waiting for worker in frame.workers)
    room = (width if width < _NARROW else width // 2) - 38
    spark = Text(sparkline(list(history)[-room:]) if room >= _MIN_SPARK else "", style="green")
    table = Table.grid(padding=(0, 1))
    table.add_column(style=_DIM)
    table.add_column(justify="right", style=_BOLD)
    table.add_column()
    table.add_row("output", f"{window.output_tokens:,.0f} tok/s", spark)
    table.add_row("prompt", f"{window.prompt_tokens:,.0f} tok/s", _note(_hit_note(window)))
    table.add_row("requests", f"{window.requests:,.1f} /s", _note(_ended_note(frame)))
    table.add_row("steps", f"{window.steps:,.0f} /s", _note(_rows_note(window)))
    waiting = Text(f"{num_waiting:,} waiting", style="yellow" if num_waiting else _DIM)
    table.add_row("running", f"{num_running:,}", waiting)
    return table


def _note(text: str) -> Text:
    return Text(text, style=_DIM, no_wrap=True, overflow="ellipsis")


def _hit_note(window: WindowFigures) -> str:
    return "" if window.prefix_hit_rate is None else f"prefix hits {window.prefix_hit_rate:.0%}"


def _rows_note(window: WindowFigures) -> str:
    return "" if window.rows is None else f"{window.rows:,.1f} rows each"


def _ended_note(frame: Frame) -> str:
    ended: dict[str, int] = frame.totals["requests"]
    bad = [f"{ended[reason]:,} {reason}" for reason in ("abort", "error") if ended[reason]]
    preempted = [f"{frame.totals['preemptions']:,} preempted"] if frame.totals["preemptions"] else []
    return ", ".join([f"{sum(ended.values()):,} ended", *bad, *preempted])


def _latency(window: WindowFigures) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_DIM)
    for _ in range(3):
        table.add_column(justify="right", style=_BOLD)
    table.add_row("", *(Text(name, style=_DIM) for name in ("p50", "p90", "p99")))
    for name, values in (
        ("first token", window.ttft_ms),
        ("next token", window.itl_ms),
        ("whole request", window.e2e_ms),
        ("queue", window.queue_ms),
    ):
        table.add_row(name, *_cells(values))
    return table


def _cells(values: Percentiles) -> tuple[str, str, str]:
    return _ms(values.p50), _ms(values.p90), _ms(values.p99)


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.1 else f"{value:.3f}"


def _workers(frame: Frame, width: int) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style=_BOLD, no_wrap=True)
    table.add_column(ratio=1, no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    bar_width = max(width - 56, 8)
    for load, share in zip(frame.workers, frame.window.workers, strict=True):
        table.add_row(str(load.rank), _bar(share, bar_width), _share_text(share), _load_text(load))
    hops = frame.window.hops_ms
    each = [f"{name} {_us(values.p50)}/{_us(values.p99)}" for name, values in hops.items()]
    text = Text("hops µs  ", style=_DIM, no_wrap=True, overflow="ellipsis").append("  ".join(each))
    both = Table.grid(expand=True)
    both.add_row(table)
    causes = _causes(frame.window.workers)
    if causes:
        both.add_row(
            Text("bubbles wait for  ", style=_DIM, no_wrap=True, overflow="ellipsis").append(causes, style=_BUBBLE)
        )
    both.add_row(text)
    return both


def _us(value_ms: float | None) -> str:
    return "-" if value_ms is None else f"{1e3 * value_ms:,.0f}"


def _bar(share: WorkerShare, width: int) -> Text:
    busy = round(share.busy * width)
    bubble = min(max(round(share.bubble * width), int(share.bubble >= 0.005)), width - busy)
    text = Text("█" * busy, style=_BUSY)
    text.append("█" * bubble, style=_BUBBLE)
    return text.append("░" * (width - busy - bubble), style=_IDLE)


def _share_text(share: WorkerShare) -> Text:
    text = Text(f"{share.busy:4.0%} busy ", style=_BUSY)
    return text.append(f"{share.bubble:4.0%} bubble", style=_BUBBLE if share.bubble >= 0.05 else _DIM)


def _load_text(load: WorkerLoad) -> Text:
    text = Text(f"{load.num_steps_in_flight} in flight", style=_DIM)
    style = "red" if load.kv_usage > 0.95 else "yellow" if load.kv_usage > 0.8 else ""
    return text.append("  KV ", style=_DIM).append(f"{load.kv_usage:4.0%}", style=style)


def _causes(workers: Sequence[WorkerShare]) -> str:
    """The largest causes of all workers' bubbles, where there is enough of them to ask."""
    total = sum(worker.bubble for worker in workers)
    if total / max(len(workers), 1) < 0.005:
        return ""
    by_cause: dict[str, float] = {}
    for worker in workers:
        for cause, share in worker.causes.items():
            by_cause[cause] = by_cause.get(cause, 0.0) + share
    largest = sorted(by_cause.items(), key=lambda item: -item[1])[:3]
    return "   ".join(f"{cause} {share / total:.0%}" for cause, share in largest)


def _processes(processes: Sequence[ProcessLine]) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1), header_style=_DIM, show_edge=False)
    table.add_column("NAME", no_wrap=True)
    for heading in ("PID", "CPU", "RSS", "UPTIME", "QUEUE", "RESTARTS"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    for line in processes:
        cpu = "-" if line.cpu_share is None else f"{line.cpu_share:.0%}"
        table.add_row(
            line.name,
            str(line.pid),
            cpu,
            f"{line.rss_bytes / 2**20:,.0f} MB",
            duration(line.uptime_s),
            str(line.queue_depth),
            str(line.num_restarts or "-"),
            _state(line),
        )
    return table


def _state(line: ProcessLine) -> Text:
    style = "green" if line.state == "ready" else "red" if line.state in ("silent", "dead") else "yellow"
    text = Text(line.state, style=style)
    if line.heartbeat_age_s is not None and line.heartbeat_age_s > _SILENT_S:
        text.append(f" {line.heartbeat_age_s:.0f} s", style="red")
    return text
