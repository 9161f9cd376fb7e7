"""RMS normalisation by the native library, on the CPU.

Owns: the checks that the C function relies on. Never does: change its arguments in place.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from procengine.kernels.native import library
from procengine.kernels.native.arguments import argument_structure
from procengine.kernels.native.torch_dtypes import DTYPES

__all__ = ["add_rms_norm", "rms_norm"]

_Arguments = argument_structure(
    "RmsNormArgs",
    "x residual total weight out",
    "x_stride residual_stride total_stride out_stride num_rows size",
    "dtype weight_dtype out_dtype",
    "eps",
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference, for float32 and bfloat16."""
    out = torch.empty(x.shape, dtype=x.dtype)
    _run(x, None, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the reference, for float32 and bfloat16."""
    assert residual.shape == x.shape
    assert residual.dtype == x.dtype
    out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    _run(x, residual, total, weight, out, eps)
    return out, total


def _run(x: Tensor, residual: Tensor | None, total: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    size = x.shape[-1]
    assert weight.shape == (size,)
    assert weight.dtype == x.dtype
    assert weight.is_contiguous()
    # `reshape` keeps the rows of a slice where they are if one stride tells them apart, and copies them if none does.
    rows = x.reshape(-1, size)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    added = None if residual is None else residual.reshape(-1, size).contiguous()
    arguments = _Arguments(
        x=rows.data_ptr(),
        residual=None if added is None else added.data_ptr(),
        total=None if total is None else total.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        x_stride=rows.stride(0),
        residual_stride=size,
        total_stride=size,
        out_stride=size,
        num_rows=rows.shape[0],
        size=size,
        dtype=DTYPES[x.dtype],
        weight_dtype=DTYPES[weight.dtype],
        out_dtype=DTYPES[out.dtype],
        eps=eps,
    )
    _function()(ctypes.byref(arguments))


@cache
def _function() -> Any:
    return library.native_function("pe_rms_norm", None, ctypes.POINTER(_Arguments))
