"""Microbenchmarks without a model: what each stage of a step costs, by batch size.

Owns: which sizes are measured, and the table. Never does: take times (`stages`, `hop`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.bench.hop import EchoPeer
from procengine.bench.stages import STAGES, time_stages
from procengine.tokenizer import Tokenizer

__all__ = ["measure_ipc", "table"]

_PERCENTILES = (50, 90, 99)


def measure_ipc(
    batch_sizes: Sequence[int], num_steps: int, input_len: int, tokenizer: Tokenizer, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Microseconds by stage, batch size and percentile; `hop` is one way between two processes with a step's frames."""
    us: dict[str, dict[str, dict[str, float]]] = {stage: {} for stage in (*STAGES, "hop_step", "hop_result")}
    num_bytes: dict[str, dict[str, int]] = {"step": {}, "result": {}}
    with EchoPeer() as peer:
        for batch_size in batch_sizes:
            progress(f"batch size {batch_size} ...")
            times = time_stages(batch_size, num_steps, input_len, tokenizer)
            hops = {
                "hop_step": peer.time_hops(times.step_frames, num_steps),
                "hop_result": peer.time_hops(times.result_frames, num_steps),
            }
            for stage, samples_ns in (times.samples_ns | hops).items():
                us[stage][str(batch_size)] = _percentiles_us(samples_ns)
            num_bytes["step"][str(batch_size)] = sum(map(len, times.step_frames))
            num_bytes["result"][str(batch_size)] = sum(map(len, times.result_frames))
    return {"num_steps": num_steps, "input_len": input_len, "num_bytes": num_bytes, "us": us}


def table(figures: dict[str, Any]) -> str:
    """Stages in rows, batch sizes in columns; in each cell p50, p90 and p99."""
    us = figures["us"]
    sizes = list(us["schedule"])
    rows = [("us: p50 / p90 / p99", *(f"{size} rows" for size in sizes))]
    rows += [(stage, *(_cell(us[stage][size]) for size in sizes)) for stage in us]
    rows += [
        (f"bytes of a {kind}", *(f"{count:,}" for count in counts.values()))
        for kind, counts in figures["num_bytes"].items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    notes = {**STAGES, "hop_step": "one way between two processes, a step's frames", "hop_result": "a result's frames"}
    width = max(map(len, notes))
    return "\n".join([*lines, "", *(f"{stage.ljust(width)}  {what}" for stage, what in notes.items())])


def _cell(percentiles: dict[str, float]) -> str:
    return " / ".join(f"{value:.1f}" for value in percentiles.values())


def _percentiles_us(samples_ns: NDArray[np.int64]) -> dict[str, float]:
    found = np.percentile(samples_ns, _PERCENTILES) / 1e3
    return {f"p{p}": round(float(value), 2) for p, value in zip(_PERCENTILES, found, strict=True)}
