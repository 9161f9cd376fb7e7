"""The part `quantized`: weights of 8 and 4 bits: their kernels, what they do to logits, and what they gain.

Owns: the rows. Never does: run a batch (`decode_run`), or round by other rules than the loader.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from gpu_checks.decode_run import DecodeRun
from gpu_checks.kernel_case import KernelCase
from gpu_checks.kernels import check_case
from gpu_checks.logits import logits_of, relative_error
from gpu_checks.machine import Machine
from gpu_checks.models import Checkpoint, build, dtype_name, make_config, make_weights, num_weight_bytes
from gpu_checks.report import Budget, Report, Row
from gpu_checks.steps import free, memory_share

from procengine.config import ModelConfig
from procengine.kernels.linear import reference
from procengine.kernels.linear import triton as linear
from procengine.kernels.linear.quantized import QuantizedMatrix, WeightKind, quantize
from procengine.torch_executor import TorchModel

__all__ = ["check_quantized"]

_BITS: dict[WeightKind, float] = {"int8": 8.5, "int4": 5.0, "fp8": 8.0}  # a weight, scales and mins included
# Root mean square error of logits, of their spread: what rounding alone does to random weights is less.
_MOST_ERROR: dict[WeightKind, float] = {"int8": 0.05, "int4": 0.5, "fp8": 0.2}


def check_quantized(machine: Machine, report: Report, budget: Budget) -> None:
    """Rows for each kind."""
    dtype = torch.bfloat16 if machine.is_cuda else torch.float32
    with torch.inference_mode():
        _check_kernels(machine, report, budget, dtype)
        free(machine)
        for name, batches in ({"1B": (1, 32), "8B": (1, 32)} if machine.is_cuda else {"tiny": (1,)}).items():
            if not budget.has(15 if machine.is_cuda else 0):
                report.add(Row("quantized", name, "skip", "no time left"))
                continue
            config = make_config(name)
            _check_model(config, make_weights(config, dtype, machine.device), batches, machine, report, budget)
            free(machine)


def _check_kernels(machine: Machine, report: Report, budget: Budget, dtype: torch.dtype) -> None:
    outputs, inputs = (28672, 4096) if machine.is_cuda else (70, 128)
    exact = torch.randn(outputs, inputs, device=machine.device, dtype=dtype)
    for kind in _BITS:
        matrix = quantize(exact, kind)
        for rows in (1, 16, 64, 128, 256, 2048) if machine.is_cuda else (1, 40):
            if budget.has():
                x = torch.randn(rows, inputs, device=machine.device, dtype=dtype)
                check_case(partial(_case, kind, matrix, x), dtype, machine, report, "quantized")
    for rows in (1, 16, 64, 128, 256, 2048) if machine.is_cuda else ():
        x = torch.randn(rows, inputs, device=machine.device, dtype=dtype)
        seconds = machine.seconds(partial(reference.linear, x, exact))
        report.add(Row("quantized", f"bfloat16 product, {rows} rows", "info", f"{seconds * 1e6:.1f} us"))


def _case(kind: WeightKind, matrix: QuantizedMatrix, x: torch.Tensor) -> KernelCase:
    rows, (outputs, inputs) = x.shape[0], matrix.shape
    return KernelCase(
        f"{kind} product, {rows} rows",
        lambda: (linear.quantized_linear(x, matrix),),
        lambda: (reference.quantized_linear(x, matrix),),
        matrix.num_bytes + (x.numel() + rows * outputs) * x.element_size(),
        1e-2 if x.dtype is torch.bfloat16 else 1e-5,
        operations=2 * rows * outputs * inputs if rows > 64 else 0,
    )


def _check_model(
    config: ModelConfig,
    weights: Checkpoint,
    batches: tuple[int, ...],
    machine: Machine,
    report: Report,
    budget: Budget,
) -> None:
    kv_dtype = dtype_name(weights)
    sequence = np.random.default_rng(7).integers(0, config.vocab_size, 100 if machine.is_cuda else 9).tolist()
    floats = build(config, weights)
    exact = logits_of(config, TorchModel(floats), [sequence], kv_dtype)
    base = {batch: DecodeRun(machine, config, floats).measure(batch, 2, 1) for batch in batches}
    del floats
    for kind, bits in _BITS.items():
        if not budget.has(6 if machine.is_cuda else 0):
            report.add(Row("quantized", f"{config.name}, {kind}", "skip", "no time left"))
            continue
        rounded = build(config, weights, kind=kind)
        error = relative_error(logits_of(config, TorchModel(rounded), [sequence], kv_dtype), exact)
        text, values = f"logits off by {error:.1%} of their spread", {"error": error}
        for batch in batches if machine.is_cuda or kind == "int8" else ():
            figures = DecodeRun(machine, config, rounded).measure(batch, 2, 1)
            gain = base[batch].pass_us / figures.pass_us
            share = memory_share(figures, num_weight_bytes(config, bits), config, machine)
            rate = figures.tokens_per_s
            values |= {f"tokens_per_s_{batch}": rate, f"gain_{batch}": gain, f"bandwidth_{batch}": share}
            text += f"; batch {batch}: {rate:.0f} tok/s ({gain:.2f} times bfloat16's), {share:.0%} of the bandwidth"
        is_good = error < _MOST_ERROR[kind]
        report.add(Row("quantized", f"{config.name}, {kind}", "ok" if is_good else "FAIL", text, values))
        del rounded
        free(machine)
