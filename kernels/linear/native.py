"""Projections through packed weights, on the CPU.

Owns: the call into the library, and its checks. Never does: pack; `packed.py` does.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from procengine.errors import ConfigError
from procengine.kernels.linear.packed import PackedMatrix
from procengine.kernels.native.library import native_function
from procengine.kernels.native.torch_dtypes import DTYPES

__all__ = ["packed_linear"]


class _Epilogue(ctypes.Structure):
    """Epilogue in `gemm.h`."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("out_type", ctypes.c_int32),
        ("silu_mul", ctypes.c_int32),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
    )


def packed_linear(
    x: Tensor,
    weight: PackedMatrix,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias + residual`, with fp32 sums.

    Args:
        x: float32 or bfloat16 [M, K], rows contiguous. Integer weights meet it rounded to int8, bf16 ones to bf16.
        weight: [N, K].
        bias: float32 [N].
        residual: of the result's shape and dtype; may be `out`.
        silu_mul: the weight's rows are in `gate_up_order`, and the result is silu(gate) * up, [M, N / 2].
        out: where the result goes: float32 or bfloat16. By default new, of x's dtype.

    Raises ConfigError for what it cannot take.
    """
    if x.ndim != 2 or x.shape[1] != weight.inputs or x.dtype not in DTYPES or x.stride(1) != 1:
        raise ConfigError(f"x must be float32 or bfloat16 [M, {weight.inputs}], not {x.dtype} {list(x.shape)}")
    if silu_mul and weight.outputs % 32:
        raise ConfigError(f"silu_mul takes a multiple of 32 outputs, not {weight.outputs}")
    shape = (x.shape[0], weight.outputs // 2 if silu_mul else weight.outputs)
    out = torch.empty(shape, dtype=x.dtype) if out is None else out
    if out.shape != shape or out.dtype not in DTYPES or out.stride(1) != 1:
        raise ConfigError(f"out must be float32 or bfloat16 {list(shape)}, not {out.dtype} {list(out.shape)}")
    if bias is not None and (bias.shape != (weight.outputs,) or bias.dtype != torch.float32):
        raise ConfigError(f"bias must be float32 [{weight.outputs}], not {bias.dtype} {list(bias.shape)}")
    if residual is not None and (residual.shape, residual.dtype, residual.stride()) != (shape, out.dtype, out.stride()):
        raise ConfigError(f"residual must be {out.dtype} {list(shape)}, not {residual.dtype} {list(residual.shape)}")
    epilogue = _Epilogue(
        out=out.data_ptr(),
        out_stride=out.stride(0),
        out_type=DTYPES[out.dtype],
        silu_mul=silu_mul,
        bias=None if bias is None else bias.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
    )
    _linear()(
        *(ctypes.byref(weight.struct), x.data_ptr(), DTYPES[x.dtype], x.stride(0), x.shape[0]),
        ctypes.byref(epilogue),
    )
    return out


@cache
def _linear() -> Any:
    integers = (ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)
    return native_function("pe_linear", None, ctypes.c_void_p, ctypes.c_void_p, *integers, ctypes.c_void_p)
