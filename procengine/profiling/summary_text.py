"""A summary as text for a terminal. Pure.

Owns: the layout. Never does: compute a figure (`summary`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from procengine.profiling.bubbles import CAUSE_HELP

__all__ = ["summary_text"]

_COLUMNS: Final = ("p50", "p90", "p99", "max")
_NUMBER_WIDTH: Final = 12
_MIN_SHARE: Final = 0.0005  # 0.0 %: not worth a line


def summary_text(summary: Mapping[str, Any]) -> str:
    """Paragraphs with tables."""
    if not summary["num_passes"]:
        return "\n".join([*_heading(summary), "", "no forward pass in this time: is anybody asking?"])
    parts = [_heading(summary), _workers(summary), _stages(summary["stages"]), _requests(summary), _cpu(summary)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _heading(summary: Mapping[str, Any]) -> list[str]:
    requests = summary["requests"]
    lines = [
        f"group {summary['group']}, {summary['model']}: {summary['seconds']:.1f} s, {summary['num_steps']:,} steps, "
        f"{summary['num_passes']:,} passes, {requests['num_ended']:,} requests ended, "
        f"{requests['num_unfinished']:,} under way"
    ]
    if summary["num_lost_records"]:
        lines.append(f"{summary['num_lost_records']:,} records were lost: what follows has holes")
    return lines


def _workers(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    for worker in summary["workers"]:
        phases = ", ".join(f"{name} {_percent(share)}" for name, share in worker["busy_share_by_phase"].items())
        lines.append(
            f"worker-{worker['rank']}: busy {_percent(worker['busy_share'])} ({phases}), "
            f"waiting {_percent(worker['bubble_share'])}"
        )
        causes = sorted(worker["bubble_share_by_cause"].items(), key=lambda each: -each[1])
        for cause, share in causes:
            if share >= _MIN_SHARE:
                lines.append(f"  {_percent(share):>7}  {cause:<14} {CAUSE_HELP[cause]}")
    if summary["overlap_share"] is not None:
        lines.append(
            f"overlap: {_percent(summary['overlap_share'])} of the frontend's planning ran while the worker was busy"
        )
    return lines


def _stages(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    heading = f"{'a step, in us':<26}" + _row(*_COLUMNS, "share")
    lines = [heading]
    for path, title in (("loop", ""), ("text", "beside the loop:"), ("flush", "a message to clients, in us")):
        lines += [title] if title else []
        for stage in stages:
            if stage["path"] == path and stage["us"]["num"]:
                name = f"{stage['process']}: {stage['stage']}"
                lines.append(f"{name:<26}" + _row(*_figures(stage["us"], 1), _percent(stage["share"])))
    return lines


def _requests(summary: Mapping[str, Any]) -> list[str]:
    requests = summary["requests"]
    if not requests["num_ended"]:
        return []
    lines = [f"{'a request, in ms':<26}" + _row(*_COLUMNS, "share")]
    for name, stage in requests["stages"].items():
        lines.append(f"{name:<26}" + _row(*_figures(stage["ms"], 2), _percent(stage["share"])))
    for name, title in (("e2e_ms", "end to end"), ("ttft_ms", "to first token"), ("tpot_ms", "per token after it")):
        lines.append(f"{title:<26}" + _row(*_figures(requests[name], 2), ""))
    return lines


def _cpu(summary: Mapping[str, Any]) -> list[str]:
    shares = ", ".join(f"{name} {_percent(cpu['share'])}" for name, cpu in summary["cpu"].items())
    return [f"CPU of one core: {shares}"] if shares else []


def _figures(spread: Mapping[str, Any], digits: int) -> Iterable[str]:
    return ("-" if spread[name] is None else f"{spread[name]:,.{digits}f}" for name in _COLUMNS)


def _row(*cells: str) -> str:
    return "".join(f"{cell:>{_NUMBER_WIDTH}}" for cell in cells).rstrip()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
