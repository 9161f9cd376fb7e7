"""Writes to the paged KV cache in Triton.

Owns: the kernel and its launch. Never does: allocate blocks or know whose they are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from procengine.kernels.kv_cache.quantized import KVCache, numbers_and_scales
from procengine.kernels.kv_cache.triton_quantize import peaks, quantized, scales_of

__all__ = ["write_kv"]


def write_kv(k: Tensor, v: Tensor, k_cache: KVCache, v_cache: KVCache, slot_mapping: Tensor) -> None:
    """As the reference; k and v may be slices of the fused projection."""
    num_tokens, num_kv_heads, head_dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    if not num_tokens:
        return
    keys, key_scales = numbers_and_scales(k_cache)
    values, value_scales = numbers_and_scales(v_cache)
    assert keys.stride() == values.stride()
    assert keys.stride()[1:] == (num_kv_heads * head_dim, head_dim, 1)
    has_scales = key_scales is not None and value_scales is not None
    _write_kv_kernel[(num_tokens,)](
        k,
        v,
        keys,
        values,
        key_scales if has_scales else keys,
        value_scales if has_scales else values,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        keys.stride(0),
        key_scales.stride(0) if key_scales is not None else 0,
        num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=keys.shape[1],
        HAS_SCALES=has_scales,
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _write_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    slot_mapping: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    block_stride: tl.tensor,
    scale_stride: tl.tensor,
    num_kv_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    heads, columns = tl.arange(0, KV_HEADS), tl.arange(0, BLOCK_D)
    within = heads[:, None] * HEAD_DIM + columns[None, :]
    is_inside = (heads < num_kv_heads)[:, None] & (columns < HEAD_DIM)[None, :]
    at = block * block_stride + offset * num_kv_heads * HEAD_DIM
    scale_at = block * scale_stride + offset * num_kv_heads
    _store(k + token * k_stride, k_cache + at, k_scales + scale_at, within, is_inside, heads, num_kv_heads, HAS_SCALES)
    _store(v + token * v_stride, v_cache + at, v_scales + scale_at, within, is_inside, heads, num_kv_heads, HAS_SCALES)


@triton.jit
def _store(
    source: tl.tensor,
    target: tl.tensor,
    scales: tl.tensor,
    within: tl.tensor,
    is_inside: tl.tensor,
    heads: tl.tensor,
    num_heads: tl.tensor,
    HAS_SCALES: tl.constexpr,
) -> None:
    own = tl.load(source + within, mask=is_inside, other=0.0)
    if HAS_SCALES:
        IS_INT8: tl.constexpr = target.dtype.element_ty == tl.int8
        wide = own.to(tl.float32)
        peak = peaks(wide, wide)
        tl.store(scales + heads, scales_of(peak, IS_INT8), mask=heads < num_heads)
        tl.store(target + within, quantized(wide, peak, IS_INT8), mask=is_inside)
    else:
        tl.store(target + within, own, mask=is_inside)
