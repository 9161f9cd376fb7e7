"""Gated activations in Triton.

Owns: the kernel and its launch. Never does: change its arguments in place, or wait for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gelu_tanh_and_mul", "silu_and_mul"]

_BLOCK = 1024


def silu_and_mul(x: Tensor) -> Tensor:
    """As the reference: `silu(gate)` is rounded to x's dtype before it meets `up`."""
    return _activate(x, is_gelu=False)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """As the reference; `gelu(gate)` is rounded too."""
    return _activate(x, is_gelu=True)


def _activate(x: Tensor, is_gelu: bool) -> Tensor:
    size = x.shape[-1] // 2
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        grid = (rows.shape[0], triton.cdiv(size, _BLOCK))
        _gate_kernel[grid](rows, out, rows.stride(0), size, IS_GELU=is_gelu, BLOCK=_BLOCK)
    return out


@triton.jit
def _gate_kernel(
    x: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    size: tl.tensor,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    gate = tl.load(x + row * x_stride + columns, mask=is_inside, other=0.0)
    up = tl.load(x + row * x_stride + size + columns, mask=is_inside, other=0.0)
    wide = gate.to(tl.float32)
    # (1 + tanh(u)) / 2 is the logistic function of 2u, so both activations are wide * logistic(slope).
    slope = wide
    if IS_GELU:
        slope = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)  # 2 sqrt(2 / pi)
    activated = (wide / (1.0 + tl.exp(tl.minimum(-slope, 80.0)))).to(gate.dtype)
    result = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * size + columns, result.to(gate.dtype), mask=is_inside)
