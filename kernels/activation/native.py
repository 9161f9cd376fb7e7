"""Gated activations by the native library, on the CPU.

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

__all__ = ["silu_and_mul"]

_Arguments = argument_structure("SiluAndMulArgs", "x out", "x_stride out_stride num_rows size", "dtype")


def silu_and_mul(x: Tensor) -> Tensor:
    """As the reference, for float32 and bfloat16."""
    size = x.shape[-1] // 2
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    arguments = _Arguments(
        x=rows.data_ptr(),
        out=out.data_ptr(),
        x_stride=rows.stride(0),
        out_stride=size,
        num_rows=rows.shape[0],
        size=size,
        dtype=DTYPES[x.dtype],
    )
    _function()(ctypes.byref(arguments))
    return out


@cache
def _function() -> Any:
    return library.native_function("pe_silu_and_mul", None, ctypes.POINTER(_Arguments))
