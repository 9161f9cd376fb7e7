"""Projections through weights of few bits in Triton.

Owns: the two kernels and their launch. Never does: quantise, or wait for the device.

With few rows a product takes as long as its weights take to be read, so that fewer bits are less time: a kernel reads
them once and makes of them, tile by tile, what they stand for, rounded to the activations' dtype. With many rows
arithmetic is what takes time, and all are written out as such floats for the vendor's matrix product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from procengine.kernels.linear.quantized import GROUP, QuantizedMatrix

__all__ = ["dequantize", "quantized_linear"]

_MOST_FUSED_ROWS = 128
_MIN_DOT = 16  # the smallest side of a matrix product
_MANY_OUTPUTS = 1 << 13  # enough programs with wide tiles


def quantized_linear(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    """As the reference, with weights rounded to x's dtype before they are multiplied."""
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows = rows.shape[0]
    if num_rows > _MOST_FUSED_ROWS:
        return functional.linear(x, dequantize(weight, x.dtype), bias)
    out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    if num_rows:
        _multiply(rows, weight, bias, out)
    return out.view(*x.shape[:-1], outputs)


def _multiply(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None, out: Tensor) -> None:
    (num_rows, outputs), num_groups = out.shape, weight.values.shape[0]
    block_m = max(_MIN_DOT, triton.next_power_of_2(num_rows))
    block_n = 64 if block_m > 32 else 32 if outputs >= _MANY_OUTPUTS else 16
    _quantized_linear_kernel[(triton.cdiv(outputs, block_n),)](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.mins is None else weight.mins,
        out if bias is None else bias,
        out,
        x.stride(0),
        num_rows,
        outputs,
        num_groups,
        HAS_BIAS=bias is not None,
        KIND=weight.kind,
        GROUP=GROUP,
        GROUPS=_groups_at_once(num_groups, 8 if block_m <= 32 else 4),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        num_stages=4 if block_m <= 32 else 3,
    )


def dequantize(weight: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """[N, K], as `QuantizedMatrix.dequantize`."""
    outputs, num_groups = weight.shape[0], weight.values.shape[0]
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    groups = _groups_at_once(num_groups, 8)
    block = 32
    _dequantize_kernel[(num_groups // groups, triton.cdiv(outputs, block))](
        weight.values,
        weight.scales,
        weight.scales if weight.mins is None else weight.mins,
        out,
        outputs,
        num_groups * GROUP,
        KIND=weight.kind,
        GROUP=GROUP,
        GROUPS=groups,
        BLOCK_N=block,
    )
    return out


def _groups_at_once(num_groups: int, most: int) -> int:
    """A power of two that divides them all."""
    return min(most, num_groups & -num_groups)


@triton.jit(do_not_specialize=["num_rows"])  # each number of rows that is odd, even or one would be a compilation
def _quantized_linear_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    mins: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    num_rows: tl.tensor,
    outputs: tl.tensor,
    num_groups: tl.tensor,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """All rows, and BLOCK_N outputs; GROUPS groups of inputs at a time, which divide them all."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < outputs
    rows = tl.arange(0, BLOCK_M)
    is_row = (rows < num_rows)[:, None]
    row_starts = x + rows.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_groups, GROUPS):
        groups = start + tl.arange(0, GROUPS)
        entries = groups.to(tl.int64)[None, :] * outputs + columns[:, None]  # [N, GROUPS]
        at = row_starts + start * GROUP
        if KIND == "int4":
            low, high = _load_int4(values, scales, mins, entries, is_column, GROUP)
            inputs = _first_halves(GROUPS, GROUP)[None, :]
            first = tl.load(at + inputs, mask=is_row, other=0.0)
            acc = _accumulate(acc, first, low, BLOCK_N, GROUPS * GROUP // 2)
            second = tl.load(at + GROUP // 2 + inputs, mask=is_row, other=0.0)
            acc = _accumulate(acc, second, high, BLOCK_N, GROUPS * GROUP // 2)
        else:
            weights = _load_bytes(values, scales, entries, is_column, KIND, GROUP)
            own = tl.load(at + tl.arange(0, GROUPS * GROUP)[None, :], mask=is_row, other=0.0)
            acc = _accumulate(acc, own, weights, BLOCK_N, GROUPS * GROUP)
    if KIND == "fp8":
        acc = acc * tl.load(scales + columns, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = out + rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=is_row & is_column[None, :])


@triton.jit
def _accumulate(
    acc: tl.tensor, x: tl.tensor, weights: tl.tensor, BLOCK_N: tl.constexpr, INPUTS: tl.constexpr
) -> tl.tensor:
    """acc + x @ weights.T; weights: [N, groups, inputs of each]."""
    flat = tl.reshape(weights, (BLOCK_N, INPUTS)).to(x.dtype)
    return tl.dot(x, tl.trans(flat), acc, input_precision="tf32x3")


@triton.jit
def _load_bytes(
    values: tl.tensor,
    scales: tl.tensor,
    entries: tl.tensor,
    is_column: tl.tensor,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """float32 [N, groups, GROUP]; fp8: without its scale, which is the same for all inputs."""
    inputs = tl.arange(0, GROUP)[None, None, :]
    is_loaded = is_column[:, None]
    stored = tl.load(values + entries[:, :, None] * GROUP + inputs, mask=is_loaded[:, :, None], other=0.0)
    if KIND == "fp8":
        return stored.to(tl.float32)
    scale = tl.load(scales + entries, mask=is_loaded, other=0.0).to(tl.float32)
    return _small_integer(stored.to(tl.uint8, bitcast=True) ^ 128, 128.0) * scale[:, :, None]


@triton.jit
def _load_int4(
    values: tl.tensor,
    scales: tl.tensor,
    mins: tl.tensor,
    entries: tl.tensor,
    is_column: tl.tensor,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """float32 [N, groups, GROUP / 2], the first inputs of each group, and the others."""
    inputs = tl.arange(0, GROUP // 2)[None, None, :]
    is_loaded = is_column[:, None]
    stored = tl.load(values + entries[:, :, None] * (GROUP // 2) + inputs, mask=is_loaded[:, :, None], other=0.0)
    scale = tl.load(scales + entries, mask=is_loaded, other=0.0).to(tl.float32)[:, :, None]
    least = tl.load(mins + entries, mask=is_loaded, other=0.0).to(tl.float32)[:, :, None]
    return _small_integer(stored & 15, 0.0) * scale + least, _small_integer(stored >> 4, 0.0) * scale + least


@triton.jit
def _first_halves(GROUPS: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """int32: the inputs of each group's first half, group after group."""
    index = tl.arange(0, GROUPS * GROUP // 2)
    return index // (GROUP // 2) * GROUP + index % (GROUP // 2)


@triton.jit
def _small_integer(byte: tl.tensor, offset: tl.constexpr) -> tl.tensor:
    """float32 of uint8, less `offset`: as the last bits of 2^23, because conversions are slow (CUDA C++ Programming
    Guide, throughput of arithmetic instructions)."""
    return (byte.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + offset)


@triton.jit
def _dequantize_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    mins: tl.tensor,
    out: tl.tensor,
    outputs: tl.tensor,
    num_inputs: tl.tensor,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < outputs
    is_stored = is_column[:, None, None]
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    entries = groups.to(tl.int64)[None, :] * outputs + columns[:, None]
    targets = out + (columns.to(tl.int64)[:, None] * num_inputs + groups[None, :] * GROUP)[:, :, None]
    if KIND == "int4":
        low, high = _load_int4(values, scales, mins, entries, is_column, GROUP)
        halves = tl.arange(0, GROUP // 2)[None, None, :]
        tl.store(targets + halves, low.to(out.dtype.element_ty), mask=is_stored)
        tl.store(targets + GROUP // 2 + halves, high.to(out.dtype.element_ty), mask=is_stored)
    else:
        weights = _load_bytes(values, scales, entries, is_column, KIND, GROUP)
        if KIND == "fp8":
            weights = weights * tl.load(scales + columns, mask=is_column, other=0.0)[:, None, None]
        tl.store(targets + tl.arange(0, GROUP)[None, None, :], weights.to(out.dtype.element_ty), mask=is_stored)
