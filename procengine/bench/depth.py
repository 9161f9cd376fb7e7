"""Configurations of the pipeline by turns, by batch size: what planning ahead gains, and what the worker waits for.

Owns: the runs and their comparison. Never does: know options (`cli.bench_depth`) or figures of a run (`steady_decode`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from procengine.bench.decode_bench import DecodeBench
from procengine.bench.ratios import compare_metric
from procengine.bench.steady_decode import SteadyDecode
from procengine.config import EngineConfig

__all__ = ["DepthPlan", "compare_depths", "measure_depths", "table"]

_WARMUP_SEED: Final = 1 << 64  # larger than anybody's
_MAX_CAUSES: Final = 3
_LEAST_SHOWN: Final = 0.0005
Runs = dict[str, list[SteadyDecode]]  # by name of the configuration


@dataclass(frozen=True, slots=True)
class DepthPlan:
    """What to run: every batch size `num_runs` times with each configuration, `output_len` tokens an answer."""

    batch_sizes: Sequence[int]
    input_len: int
    output_len: int
    num_runs: int


def measure_depths(
    configs: Mapping[str, EngineConfig], plan: DepthPlan, progress: Callable[[str], None]
) -> dict[int, Runs]:
    """Launch a group of each configuration and let them run by turns (ABC, CBA, ...); by batch size.

    Raises:
        ProcengineError: a group did not come up, or answers are too short to measure.
    """
    runs: dict[int, Runs] = {size: {name: [] for name in configs} for size in plan.batch_sizes}
    with contextlib.ExitStack() as exits:
        benches = {name: exits.enter_context(DecodeBench(config)) for name, config in configs.items()}
        for name, bench in benches.items():
            bench.run(max(plan.batch_sizes), plan.input_len, plan.output_len, _WARMUP_SEED)
            progress(f"{name}: warm")
        for number in range(plan.num_runs):
            names = list(benches) if number % 2 == 0 else list(reversed(benches))
            for size in plan.batch_sizes:
                for name in names:
                    found = benches[name].run(size, plan.input_len, plan.output_len, seed=number)
                    runs[size][name].append(found)
                    progress(f"run {number + 1}, {size} requests, {name}: {found.tokens_per_s:,.1f} tokens/s")
    return runs


def compare_depths(runs: Mapping[int, Runs]) -> list[dict[str, Any]]:
    """A row for each batch size and configuration: medians, and the ratios of its runs to those of the first. Pure."""
    rows = []
    for size, by_name in runs.items():
        first = [run.tokens_per_s for run in next(iter(by_name.values()))]
        for name, found in by_name.items():
            compared = compare_metric(first, [run.tokens_per_s for run in found])
            causes = {
                cause: median(run.idle_share_by_cause[cause] for run in found) for cause in found[0].idle_share_by_cause
            }
            rows.append(
                {
                    "batch_size": size,
                    "name": name,
                    "tokens_per_s": compared["b_median"],
                    "ratio": compared["ratio_median"],
                    "ratio_min": compared["ratio_min"],
                    "ratio_max": compared["ratio_max"],
                    "pass_ms": median(run.pass_ms for run in found),
                    "idle_share": median(run.idle_share for run in found),
                    "idle_share_max": max(run.idle_share for run in found),
                    "idle_share_by_cause": causes,
                    "runs": [asdict(run) for run in found],
                }
            )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For people. Pure."""
    head = ("batch", "configuration", "tokens/s", "ratio", "min .. max", "pass ms", "idle %", "most", "idle for (%)")
    lines = [head, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_left = (1, len(head) - 1)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in is_left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    causes = sorted(row["idle_share_by_cause"].items(), key=lambda item: -item[1])[:_MAX_CAUSES]
    return (
        f"{row['batch_size']}",
        row["name"],
        f"{row['tokens_per_s']:,.1f}",
        f"{row['ratio']:.3f}",
        f"{row['ratio_min']:.3f} .. {row['ratio_max']:.3f}",
        f"{row['pass_ms']:.2f}",
        f"{row['idle_share']:.1%}".rstrip("%"),
        f"{row['idle_share_max']:.1%}".rstrip("%"),
        ", ".join(f"{cause} {share:.1%}".rstrip("%") for cause, share in causes if share >= _LEAST_SHOWN),
    )
