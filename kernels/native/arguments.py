"""Arguments of C functions that take many: structures mirrored here, and the element types they name.

Owns: how a structure of the library is laid out, and how numpy arrays stand for its element types. Never does: check
values; the wrapper of each function does. Free of torch.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["BFLOAT16", "FLOAT_IDS", "KV_CACHE_IDS", "address", "argument_structure", "to_float32"]

# numpy has no bfloat16: an array of such numbers is one of their bits.
BFLOAT16: Final = np.dtype(np.uint16)
FLOAT_IDS: Final = {np.dtype(np.float32): 0, BFLOAT16: 1, np.dtype(np.float16): 2}  # `pe::DType`
KV_CACHE_IDS: Final = {np.dtype(np.float32): 0, BFLOAT16: 1, np.dtype(np.int8): 3}  # the same, of caches


def address(array: NDArray[Any]) -> int:
    """Where an array's elements begin; it must outlive the use of that."""
    found: int = array.__array_interface__["data"][0]
    return found


def argument_structure(name: str, pointers: str, int64s: str, int32s: str, floats: str = "") -> type[ctypes.Structure]:
    """A structure of pointers, then int64, then int32, then float members, whose names are given apart by spaces.

    Pointers are set to integers, `address(array)` or `Tensor.data_ptr()`; what is not set is 0.
    """
    kinds = ((pointers, ctypes.c_void_p), (int64s, ctypes.c_int64), (int32s, ctypes.c_int32), (floats, ctypes.c_float))
    fields = [(field, kind) for names, kind in kinds for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def to_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers that float32, float16 or (as uint16) bfloat16 elements stand for."""
    if values.dtype == BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
