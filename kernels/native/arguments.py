"""Arguments of C functions that take many: structures mirrored here, and the element types they name.

Owns: how a structure of the library is laid out. Never does: check values; the wrapper of each function does.
"""

from __future__ import annotations

import ctypes

import torch

__all__ = ["DTYPES", "argument_structure"]

# `pe::DType`, of those that row-wise kernels and attention take.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def argument_structure(name: str, pointers: str, int64s: str, int32s: str, floats: str = "") -> type[ctypes.Structure]:
    """A structure of pointers, then int64, then int32, then float members, whose names are given apart by spaces.

    Pointers are set to the integer that `Tensor.data_ptr()` returns; what is not set is 0.
    """
    kinds = ((pointers, ctypes.c_void_p), (int64s, ctypes.c_int64), (int32s, ctypes.c_int32), (floats, ctypes.c_float))
    fields = [(field, kind) for names, kind in kinds for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})
