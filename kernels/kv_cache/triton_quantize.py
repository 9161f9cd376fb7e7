"""What kernels that write or read a KV cache of 8 bits share.

Owns: the rounding, and the way back. Never does: load or store.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LARGEST_FP8", "LARGEST_INT8", "as_floats", "peaks", "quantized", "scales_of"]

LARGEST_INT8 = tl.constexpr(127.0)
LARGEST_FP8 = tl.constexpr(448.0)
# Added and taken away, a float32 is rounded to even: to whole numbers, and to the steps of e4m3 below 2^-6.
_TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23
_TO_SMALLEST = tl.constexpr(24576.0)  # 1.5 * 2^23 * 2^-9


@triton.jit
def peaks(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """float32 [heads]: the largest number of each head, of which these are halves (or both the whole); NaN where there
    is one."""
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)
    is_nan = tl.max(((first != first) | (second != second)).to(tl.int32), axis=1)
    return tl.where(is_nan > 0, float("nan"), largest)


@triton.jit
def scales_of(peak: tl.tensor, IS_INT8: tl.constexpr) -> tl.tensor:
    """float32 [heads], as `reference.quantize` has them."""
    largest = LARGEST_INT8 if IS_INT8 else LARGEST_FP8
    return tl.div_rn(peak, tl.full(peak.shape, largest, tl.float32))


@triton.jit
def quantized(heads: tl.tensor, peak: tl.tensor, IS_INT8: tl.constexpr) -> tl.tensor:
    """int8 or float8_e4m3fn, as `reference.quantize` has them. heads: float32 [heads, columns]; peak: of `peaks`."""
    largest = LARGEST_INT8 if IS_INT8 else LARGEST_FP8
    is_large = peak > 1e-30
    inverse = tl.div_rn(tl.full(peak.shape, largest, tl.float32), tl.where(is_large, peak, 1.0))
    inverse = tl.where(is_large, inverse, 0.0)
    scaled = heads * inverse[:, None]
    if IS_INT8:
        return ((scaled + _TO_WHOLE) - _TO_WHOLE).to(tl.int8)
    else:  # the compiler wants one type of all that is returned
        return _to_e4m3(scaled)


@triton.jit
def _to_e4m3(x: tl.tensor) -> tl.tensor:
    """Rounded to even before the conversion, so that it has nothing to round: Triton's interpreter loses the carry."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + _TO_SMALLEST) - _TO_SMALLEST
    return tl.where(tl.abs(x) < 0.015625, small, normal).to(tl.float8e4nv)


@triton.jit
def as_floats(numbers: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Numbers of a cache in the dtype of the queries, which holds all that 8 bits can be."""
    if numbers.dtype == tl.int8:
        # As the last bits of 2^23, because conversions are slow (CUDA C++ Programming Guide, throughput of arithmetic).
        byte = (numbers.to(tl.uint8, bitcast=True) ^ 128).to(tl.int32)
        return ((byte | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 128.0)).to(dtype)
    else:  # the compiler wants one type of all that is returned
        return numbers.to(dtype)
