"""Runs of several engines as tables: medians, spreads, ratios of neighbouring runs, and targets. Pure.

Owns: who is compared with whom. Never does: run anything.

Ratios say how many times better procengine is: its rate over the peer's, or the peer's time over its own. An engine is
compared with procengine at the same class of weights if that was measured too, else with procengine's first entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from procengine.bench.peers.loads import Figure, Workload
from procengine.bench.peers.results import EngineResult
from procengine.bench.peers.targets import TARGETS, Target
from procengine.bench.ratios import compare_metric

__all__ = ["Row", "Verdict", "compare_engines", "judge_targets", "tables"]

_MISSING: Final = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one engine over all runs.

    Attributes:
        against: the procengine entry that it is compared with; None for procengine itself and where there is no pair.
        ratios: of each pair: how many times better procengine is.
    """

    workload: str
    path: str
    engine: str
    weights: str
    precision: str
    is_ours: bool
    values: tuple[float, ...]
    against: str | None = None
    ratios: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was found: the best peer, the best entry of procengine, their ratios.

    Attributes:
        first_ratios: of the first entry of procengine against the same peer; empty if it is of another class.
    """

    target: Target
    ours: Row | None
    peer: Row | None
    ratios: tuple[float, ...]
    first_ratios: tuple[float, ...] = ()

    @property
    def is_met(self) -> bool | None:
        """None: it was not measured."""
        if self.target.limit is not None:
            return None if self.ours is None else median(self.ours.values) <= self.target.limit
        assert self.target.min_ratio is not None
        return median(self.ratios) >= self.target.min_ratio if self.ratios else None


def compare_engines(results: Sequence[EngineResult], workloads: Sequence[Workload]) -> list[Row]:
    """A row for each figure of each engine that has a value."""
    return [row for workload in workloads for figure in workload.figures for row in _rows(results, workload, figure)]


def judge_targets(results: Sequence[EngineResult], workloads: Sequence[Workload]) -> list[Verdict]:
    """All targets of these work loads; the best of a class is the one with the best median."""
    verdicts = []
    for workload in workloads:
        for figure in workload.figures:
            asked = [target for target in TARGETS if (target.workload, target.path) == (workload.name, figure.path)]
            verdicts += [_judge(target, workload, figure, results) for target in asked]
    return verdicts


def tables(results: Sequence[EngineResult], workloads: Sequence[Workload]) -> str:
    """Everything for people: the engines, each work load, the best peers and the targets."""
    parts = [_engine_table(results)]
    rows = compare_engines(results, workloads)
    for workload in workloads:
        for figure in workload.figures:
            chosen = [row for row in rows if (row.workload, row.path) == (workload.name, figure.path)]
            parts.append(_figure_table(workload, figure, chosen))
    parts.append(_target_table(judge_targets(results, workloads), workloads))
    failed = [f"{result.spec.name} failed: {result.error}" for result in results if result.error is not None]
    return "\n\n".join([*parts, *failed])


def _rows(results: Sequence[EngineResult], workload: Workload, figure: Figure) -> Iterator[Row]:
    for result in results:
        series = _series(result, workload, figure)
        values = tuple(value for value in series if value is not None)
        if not values:
            continue
        against = None if result.spec.is_ours else _counterpart(result, results, workload, figure)
        yield Row(
            workload.name,
            figure.path,
            result.spec.name,
            result.spec.weights,
            result.precision,
            result.spec.is_ours,
            values,
            None if against is None else against.spec.name,
            () if against is None else _pair_ratios(_series(against, workload, figure), series, figure),
        )


def _counterpart(
    result: EngineResult, results: Sequence[EngineResult], workload: Workload, figure: Figure
) -> EngineResult | None:
    ours = [one for one in results if one.spec.is_ours and any(_series(one, workload, figure))]
    alike = [one for one in ours if one.spec.weights == result.spec.weights]
    return next(iter([*alike, *ours]), None)


def _series(result: EngineResult, workload: Workload, figure: Figure) -> list[float | None]:
    """The figure of each run, None where there is none."""
    return [_value(run, figure.path) for run in result.runs_by_workload.get(workload.name, ())]


def _value(run: Mapping[str, Any] | None, path: str) -> float | None:
    value: Any = run
    for name in path.split("."):
        value = None if value is None else value[name]
    return value if value is None else float(value)


def _pair_ratios(ours: Sequence[float | None], theirs: Sequence[float | None], figure: Figure) -> tuple[float, ...]:
    """How many times better ours is, of each run in which both have the figure; the last may have been interrupted."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    if not pairs:
        return ()
    a, b = zip(*pairs, strict=True)
    compared = compare_metric(b, a) if figure.is_better_high else compare_metric(a, b)
    return tuple(ratio for ratio in compared["ratios"] if ratio is not None)


def _judge(target: Target, workload: Workload, figure: Figure, results: Sequence[EngineResult]) -> Verdict:
    in_class = [row for row in _rows(results, workload, figure) if target.weights in (None, row.weights)]
    ours = _best([row for row in in_class if row.is_ours], figure)
    peer = _best([row for row in in_class if not row.is_ours], figure)
    if ours is None or peer is None:
        return Verdict(target, ours, peer, ())
    series_by_name = {result.spec.name: _series(result, workload, figure) for result in results}
    theirs = series_by_name[peer.engine]
    first = next(result.spec for result in results if result.spec.is_ours)
    is_in_class = target.weights in (None, first.weights)
    return Verdict(
        target,
        ours,
        peer,
        _pair_ratios(series_by_name[ours.engine], theirs, figure),
        _pair_ratios(series_by_name[first.name], theirs, figure) if is_in_class else (),
    )


def _best(rows: Sequence[Row], figure: Figure) -> Row | None:
    choose = max if figure.is_better_high else min
    return choose(rows, key=lambda row: median(row.values), default=None)


def _engine_table(results: Sequence[EngineResult]) -> str:
    rows = [("engine", "version", "computes in", "weights", "ready s", "idle cores", "peak RSS MiB")]
    rows += [
        (
            result.spec.name,
            result.version or _MISSING,
            result.precision or _MISSING,
            result.spec.weights,
            f"{result.ready_s:.1f}",
            f"{result.idle_share:.2f}{' (stopped)' if result.is_stopped_when_idle else ''}",
            f"{result.peak_rss_mib:.0f}",
        )
        for result in results
    ]
    return _aligned(rows, num_left=4)


def _figure_table(workload: Workload, figure: Figure, rows: Sequence[Row]) -> str:
    direction = "more" if figure.is_better_high else "less"
    head = ("engine", "weights", "against", figure.unit, "min .. max", "procengine is better by", "min .. max")
    lines = [
        (
            row.engine,
            row.weights,
            row.against or _MISSING,
            _number(median(row.values)),
            _range(row.values, _number),
            _times(median(row.ratios)) if row.ratios else _MISSING,
            _range(row.ratios, _times),
        )
        for row in rows
    ]
    title = f"{workload.name}: {workload.summary}; {figure.unit}, {direction} is better"
    return f"{title}\n{_aligned([head, *lines], num_left=3)}" if lines else f"{title}\nnobody has it"


def _target_table(verdicts: Sequence[Verdict], workloads: Sequence[Workload]) -> str:
    units = {(workload.name, figure.path): figure.unit for workload in workloads for figure in workload.figures}
    head = (
        *("target", "weights", "best peer", "median", "procengine", "median"),
        *("better by", "min .. max", "first entry by", "wanted", ""),
    )
    return "Best peers and targets\n" + _aligned([head, *(_target_row(one, units) for one in verdicts)], num_left=3)


def _target_row(verdict: Verdict, units: Mapping[tuple[str, str], str]) -> tuple[str, ...]:
    target, ours, peer = verdict.target, verdict.ours, verdict.peer
    wanted = f">= {target.min_ratio:g} x" if target.limit is None else f"<= {target.limit:g}"
    return (
        f"{target.workload} {units[target.workload, target.path]}",
        target.weights or "any",
        peer.engine if peer else _MISSING,
        _number(median(peer.values)) if peer else _MISSING,
        ours.engine if ours else _MISSING,
        _number(median(ours.values)) if ours else _MISSING,
        _times(median(verdict.ratios)) if verdict.ratios else _MISSING,
        _range(verdict.ratios, _times),
        _times(median(verdict.first_ratios)) if verdict.first_ratios else _MISSING,
        wanted,
        {True: "met", False: "missed", None: "not measured"}[verdict.is_met],
    )


def _aligned(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """Columns; the first `num_left` begin at the left, the others are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(w) if at < num_left else cell.rjust(w)
            for at, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}"


def _times(ratio: float) -> str:
    return f"{ratio:.3f}"


def _range(values: Sequence[float], shown: Callable[[float], str]) -> str:
    return f"{shown(min(values))} .. {shown(max(values))}" if values else _MISSING
