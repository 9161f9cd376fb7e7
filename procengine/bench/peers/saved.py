"""Comparisons that were run in pieces: what one leaves in a file, and several files as one comparison. Pure.

Owns: the file's shape, and that runs which were neighbours stay so. Never does: read or write a file, run, compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from procengine.bench.peers.comparison import compare_engines, judge_targets
from procengine.bench.peers.loads import WORKLOADS, Workload
from procengine.bench.peers.results import OTHERS, EngineResult
from procengine.errors import ConfigError

__all__ = ["decode_results", "encode_results", "measured_workloads", "merge_results", "only_quiet"]

Runs = list[dict[str, Any] | None]


class _File(msgspec.Struct):
    """What is read of a file; the rest of it is for people."""

    engines: list[EngineResult]


_decoder: Final = msgspec.json.Decoder(_File)


def encode_results(results: Sequence[EngineResult], workloads: Sequence[Workload]) -> bytes:
    """All figures of all runs, and what follows from them, as one JSON object."""
    rows, targets = compare_engines(results, workloads), judge_targets(results, workloads)
    return msgspec.json.encode({"engines": results, "rows": rows, "targets": targets}, order="sorted")


def decode_results(data: bytes, origin: str) -> list[EngineResult]:
    """The engines of a file; `origin` names it in errors.

    Raises:
        ConfigError: it is none of `encode_results`.
    """
    try:
        return _decoder.decode(data).engines
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"--merge: {origin} was not written by --json: {error}") from error


def measured_workloads(results: Sequence[EngineResult]) -> list[Workload]:
    """Work loads that somebody ran, in their usual order."""
    names = {name for result in results for name in result.runs_by_workload}
    return [workload for name, workload in WORKLOADS.items() if name in names]


def merge_results(pieces: Sequence[Sequence[EngineResult]]) -> list[EngineResult]:
    """One comparison of all pieces: each engine's runs one after the other, None where a piece went without it.

    Raises:
        ConfigError: an engine is not the same in two pieces.
    """
    merged: dict[str, EngineResult] = {}
    for result in (result for piece in pieces for result in piece):
        known = merged.get(result.spec.name)
        merged[result.spec.name] = replace(result, runs_by_workload={}) if known is None else _both(known, result)
    for workload in measured_workloads([result for piece in pieces for result in piece]):
        for name, result in merged.items():
            runs = [run for piece in pieces for run in _runs(name, workload.name, piece)]
            result.runs_by_workload[workload.name] = runs
    return list(merged.values())


def only_quiet(results: Sequence[EngineResult], max_others: float) -> list[EngineResult]:
    """The same without the runs in which others used more than so many cores: None stands for them."""
    return [
        replace(
            result,
            runs_by_workload={
                name: [run if run is not None and run.get(OTHERS, 0.0) <= max_others else None for run in runs]
                for name, runs in result.runs_by_workload.items()
            },
        )
        for result in results
    ]


def _both(known: EngineResult, new: EngineResult) -> EngineResult:
    for what in ("version", "precision"):
        a, b = getattr(known, what), getattr(new, what)
        if a and b and a != b:
            raise ConfigError(f"--merge: the {what} of {known.spec.name} is {a} in one file and {b} in another")
    return replace(
        known,
        version=known.version or new.version,
        precision=known.precision or new.precision,
        ready_s=max(known.ready_s, new.ready_s),
        idle_share=max(known.idle_share, new.idle_share),
        is_stopped_when_idle=known.is_stopped_when_idle or new.is_stopped_when_idle,
        peak_rss_mib=max(known.peak_rss_mib, new.peak_rss_mib),
        error=known.error or new.error,
    )


def _runs(name: str, workload: str, piece: Sequence[EngineResult]) -> Runs:
    """An engine's runs of a piece, as many as anybody has: the n-th runs of all engines were neighbours."""
    num_runs = max((len(result.runs_by_workload.get(workload, ())) for result in piece), default=0)
    own: Runs = next((result.runs_by_workload.get(workload, []) for result in piece if result.spec.name == name), [])
    return own + [None] * (num_runs - len(own))
