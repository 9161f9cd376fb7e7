"""RMS normalisation in Triton, one program a row.

Owns: the kernel and its launch. Never does: change its arguments in place, or wait for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference, with its order of roundings."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(x, None, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the reference: x and residual are read once, the normalised sum and the sum written once."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(x, residual, total, weight, out, eps)
    return out, total


def _run(x: Tensor, residual: Tensor | None, total: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    size = x.shape[-1]
    rows = _rows(x)
    added = rows if residual is None else _rows(residual)
    if not rows.shape[0]:
        return
    _rms_norm_kernel[(rows.shape[0],)](
        rows,
        added,
        out if total is None else total,
        weight,
        out,
        rows.stride(0),
        added.stride(0),
        size,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=triton.next_power_of_2(size),
    )


def _rows(x: Tensor) -> Tensor:
    """[rows, N] with neighbours in the last dimension; a slice stays where it is if one stride tells its rows apart."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < size
    values = tl.load(x + row * x_stride + columns, mask=is_inside, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + row * residual_stride + columns, mask=is_inside, other=0.0)
        values = (added.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
        tl.store(total + row * size + columns, values, mask=is_inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    factors = tl.load(weight + columns, mask=is_inside, other=0.0)
    # Rounded before the weight comes: models were trained with that order.
    normed = (wide * scale).to(values.dtype).to(tl.float32) * factors.to(tl.float32)
    tl.store(out + row * size + columns, normed.to(values.dtype), mask=is_inside)
