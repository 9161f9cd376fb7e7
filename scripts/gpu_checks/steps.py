"""The part `steps`: what a decode step costs, and how long the device waits between two of them.

Owns: which batches, the rows, and what must hold. Never does: run a batch (`decode_run`).
"""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import torch
from gpu_checks.decode_run import DecodeFigures, DecodeRun
from gpu_checks.machine import Machine
from gpu_checks.models import build, make_config, make_weights, num_weight_bytes, shape_of
from gpu_checks.report import Budget, Report, Row, Status

from procengine.config import KVCacheDType, ModelConfig

__all__ = ["check_steps", "free", "memory_share"]

# Depth, decode steps, graphs, format of keys and values if that is not the model's.
_MODES: dict[str, tuple[int, int, bool, KVCacheDType | None]] = {
    "depth 1": (1, 1, True, None),
    "depth 2": (2, 1, True, None),
    "8 steps a message": (2, 8, True, None),
    "no graphs": (2, 1, False, None),
    "int8 cache": (2, 1, True, "int8"),
}
_RUNS = {"135M": (1, 32, 256, 512), "1B": (1, 32, 256, 512), "8B": (32, 256)}
_MAX_IDLE_SHARE = 0.01  # of a step of an 8B model, from batch 32 on
_MAX_IDLE_US = 170.0  # between two steps of the smallest model
_MIN_ASYNC_GAIN = 1.2  # of depth 2 over depth 1, at most 1B, batch 256
_MIN_BANDWIDTH_SHARE = 0.8  # from 1B on in bf16, batch 1


def check_steps(machine: Machine, report: Report, budget: Budget) -> None:
    """Rows for each model, batch and mode."""
    dtype = torch.bfloat16 if machine.is_cuda else torch.float32
    for name, batches in (_RUNS if machine.is_cuda else {"tiny": (1, 3)}).items():
        if not budget.has(10 if machine.is_cuda else 0):
            report.add(Row("steps", name, "skip", "no time left"))
            continue
        config = make_config(name)
        with torch.inference_mode():
            run = DecodeRun(machine, config, build(config, make_weights(config, dtype, machine.device)))
        for batch in batches:
            _check_batch(name, batch, run, machine, report, budget, config)
        if machine.is_cuda and name == "135M":
            waits = run.waits_for_device(32)
            what = "135M, batch 32, what waits for the device"
            report.add(Row("steps", what, "FAIL" if waits else "ok", waits or "nothing"))
        del run
        free(machine)


def _check_batch(
    name: str, batch: int, run: DecodeRun, machine: Machine, report: Report, budget: Budget, config: ModelConfig
) -> None:
    found: dict[str, DecodeFigures] = {}
    for mode, (depth, decode_steps, with_graphs, kv_dtype) in _MODES.items():
        if not _is_of_interest(name, batch, mode):
            continue
        what = f"{name}, batch {batch}, {mode}"
        if not budget.has(4 if machine.is_cuda else 0):
            report.add(Row("steps", what, "skip", "no time left"))
            continue
        figures = found[mode] = run.measure(batch, depth, decode_steps, with_graphs=with_graphs, kv_dtype=kv_dtype)
        kv_bytes = 2 if kv_dtype is None else 1 + 4 / config.head_dim
        share = memory_share(figures, num_weight_bytes(config, 16), config, machine, kv_bytes)
        values: dict[str, Any] = {**asdict(figures), "tokens_per_s": figures.tokens_per_s, "of_bandwidth": share}
        missed = _missed(name, mode, figures, share) if machine.is_cuda else ""
        report.add(Row("steps", what, "MISS" if missed else "ok", _text(figures, share) + missed, values))
    if "depth 1" in found and "depth 2" in found:
        gain = found["depth 1"].pass_us / found["depth 2"].pass_us
        is_asked = machine.is_cuda and batch == 256 and name != "8B"
        status: Status = "info" if not is_asked else "ok" if gain >= _MIN_ASYNC_GAIN else "MISS"
        asked = f" (asked: {_MIN_ASYNC_GAIN})" if is_asked else ""
        report.add(
            Row("steps", f"{name}, batch {batch}, depth 2 over depth 1", status, f"{gain:.2f}{asked}", {"gain": gain})
        )


def _is_of_interest(name: str, batch: int, mode: str) -> bool:
    if mode == "int8 cache":
        return batch in (3, 256) and name != "135M"
    return (name != "8B" or mode == "depth 2") and (mode != "no graphs" or batch <= 32)


def memory_share(
    figures: DecodeFigures, weight_bytes: float, config: ModelConfig, machine: Machine, kv_bytes: float = 2
) -> float:
    """The time that reading weights, keys and values takes at the memory's best, of the time that a pass takes.
    `kv_bytes`: of each number of those."""
    kv = shape_of(config).kv_bytes(round(figures.batch * figures.context), 1) * kv_bytes
    return (weight_bytes + kv) / machine.bytes_per_s / (figures.pass_us / 1e6)


def free(machine: Machine) -> None:
    """Give the memory of what is gone back to the device."""
    if machine.is_cuda:
        gc.collect()  # an executor and its graphs name each other
        torch.cuda.empty_cache()


def _text(figures: DecodeFigures, share: float) -> str:
    text = f"{figures.pass_us:.0f} us, {figures.tokens_per_s:.0f} tok/s, {share:.0%} of the bandwidth"
    if figures.trace is not None:
        trace = figures.trace
        text += f"; idle {trace.idle:.0f} us ({trace.idle_share:.1%}), longest gap {trace.longest_gap:.0f} us"
        text += f"; H2D {trace.h2d:.1f}, D2H {trace.d2h:.1f}, busy {trace.busy:.0f} us"
    return text


def _missed(name: str, mode: str, figures: DecodeFigures, share: float) -> str:
    """What must hold and does not."""
    trace, missed = figures.trace, []
    if mode == "depth 2" and trace is not None:
        if name == "8B" and figures.batch >= 32 and trace.idle_share > _MAX_IDLE_SHARE:
            missed.append(f"idle more than {_MAX_IDLE_SHARE:.0%}")
        if name == "135M" and trace.longest_gap > _MAX_IDLE_US:
            missed.append(f"gap more than {_MAX_IDLE_US:.0f} us")
    if name == "1B" and mode == "depth 2" and figures.batch == 1 and share < _MIN_BANDWIDTH_SHARE:
        missed.append(f"less than {_MIN_BANDWIDTH_SHARE:.0%} of the bandwidth")
    return f" [{', '.join(missed)}]" if missed else ""
