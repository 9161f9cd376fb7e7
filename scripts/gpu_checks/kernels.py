"""The part `kernels`: every Triton kernel against its reference, and its time against what memory allows.

Owns: the rows. Never does: make inputs (`kernel_cases`), or time by itself (`machine`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch
from gpu_checks.kernel_case import KernelCase, Sizes
from gpu_checks.kernel_cases import kernel_cases
from gpu_checks.machine import Machine
from gpu_checks.report import Budget, DeviceLostError, Report, Row

__all__ = ["check_case", "check_kernels"]


def check_kernels(machine: Machine, report: Report, budget: Budget, begin: int = 0) -> None:
    """A row for each kernel and dtype, from number `begin` on. Raises DeviceLostError."""
    sizes = Sizes.of(machine.is_cuda)
    # Triton's interpreter cannot multiply bfloat16 matrices, and there is nothing to time in it.
    dtypes = (torch.bfloat16, torch.float32) if machine.is_cuda else (torch.float32,)
    cases = ((make, dtype) for dtype in dtypes for make in kernel_cases(sizes, dtype, machine.device))
    for number, (make, dtype) in enumerate(islice(cases, begin, None), begin):
        if not budget.has(1.0 if machine.is_cuda else 0.0):
            report.add(Row("kernels", "the others", "skip", "no time left"))
            return
        with torch.inference_mode():
            check_case(make, dtype, machine, report)
        if machine.is_lost:
            raise DeviceLostError(number + 1)


def check_case(
    make: Callable[[], KernelCase], dtype: torch.dtype, machine: Machine, report: Report, part: str = "kernels"
) -> None:
    """A row for one kernel."""
    name = str(dtype).removeprefix("torch.")
    try:
        case = make()
        error, is_good = case.error()
        values: dict[str, float] = {"error": error, "tolerance": case.tolerance, "may_differ": case.may_differ}
        result = f"error {error:.1e}"
        if machine.is_cuda and dtype is torch.bfloat16:
            result += _timed(case, machine, values)
    except Exception as failed:  # noqa: BLE001  whatever a kernel does, the next one is looked at
        report.add(Row(part, f"{getattr(make, '__name__', 'case')}, {name}", "FAIL", _first_line(failed)))
        return
    report.add(Row(part, f"{case.name}, {name}", "ok" if is_good else "FAIL", result, values))


def _timed(case: KernelCase, machine: Machine, values: dict[str, float]) -> str:
    """How long it takes: for the reader, and into `values`."""
    ours, theirs = machine.seconds(case.run), machine.seconds(case.reference)
    share = case.num_bytes / ours / machine.bytes_per_s
    values |= {"us": ours * 1e6, "reference_us": theirs * 1e6, "bytes": case.num_bytes, "of_bandwidth": share}
    result = f", {ours * 1e6:.1f} us (reference {theirs * 1e6:.1f}), {share:.0%} of the bandwidth"
    if case.operations:
        values["tflops"] = case.operations / ours / 1e12
        result += f", {values['tflops']:.0f} TFLOP/s"
    return result


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
