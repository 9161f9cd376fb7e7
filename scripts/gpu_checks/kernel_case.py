"""`KernelCase`: one Triton kernel at one shape, beside its reference.

Owns: how the two are compared. Never does: choose shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["KernelCase", "Sizes"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model whose kernels are measured, and of the batch."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rows: int  # that decode
    context: int  # tokens each of them has
    prompt: int  # tokens of one prefill
    block_size: int = 16

    @staticmethod
    def of(is_cuda: bool) -> Sizes:
        """An 8B model's on a GPU; tiny ones for the interpreter."""
        if is_cuda:
            return Sizes(4096, 14336, 32, 8, 128, 128256, 64, 4096, 2048)
        return Sizes(64, 96, 4, 2, 16, 700, 3, 40, 20, block_size=4)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """Both callables return the tensors to compare; what works in place returns what it wrote to, its own copy.

    Attributes:
        num_bytes: that must be read and written at least; 0 where memory is not what limits it.
        operations: multiplications and additions, where arithmetic is what limits it.
        tolerance: of the largest difference, relative to the largest value of the reference (floats).
        may_differ: the share of integers that may: where two candidates are as close as the rounding of a sum.
    """

    name: str
    run: Callable[[], tuple[Tensor, ...]]
    reference: Callable[[], tuple[Tensor, ...]]
    num_bytes: int
    tolerance: float
    operations: int = 0
    may_differ: float = 0.0

    def error(self) -> tuple[float, bool]:
        """The largest difference, and whether it may be."""
        worst, is_good = 0.0, True
        for ours, expected in zip(self.run(), self.reference(), strict=True):
            if ours.is_floating_point():
                found, allowed = _relative(ours, expected), self.tolerance
            else:
                found, allowed = float((ours != expected).float().mean()), self.may_differ
            worst, is_good = max(worst, found), is_good and found <= allowed
        return worst, is_good


def _relative(ours: Tensor, expected: Tensor) -> float:
    """NaN and infinities must be where the reference has them."""
    a, b = ours.float(), expected.float()
    is_finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), is_finite) or not torch.equal(a[a.isinf()], b[b.isinf()]):
        return float("inf")
    if not bool(is_finite.any()):
        return 0.0
    a, b = a[is_finite], b[is_finite]
    scale: Any = b.abs().max().clamp_min(1e-6)
    return float((a - b).abs().max() / scale)
