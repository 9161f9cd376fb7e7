"""Rotary position embedding in Triton, and the write of keys and values to the cache that follows it.

Owns: the kernel and its launch. Never does: make the tables, change q, k or v in place, or wait for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from procengine.kernels.kv_cache.quantized import KVCache, numbers_and_scales
from procengine.kernels.kv_cache.triton_quantize import peaks, quantized, scales_of

__all__ = ["apply_rope", "rope_and_write_kv"]


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference."""
    rotated_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    rotated_q = _run(q, k, k, cos, sin, positions, rotated_k, rotated_k, slot_mapping=None)
    return rotated_q, rotated_k


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    slot_mapping: Tensor,
) -> Tensor:
    """The rotated queries; rotated keys, and values, are stored at their slots. As `apply_rope` and `write_kv`.

    q: [T, H, D]; k, v: [T, Hkv, D], which may be slices of the fused projection; the caches: [num_blocks, block_size,
    Hkv, D], contiguous, or quantised; slot_mapping: int64 [T]. Returns [T, H, D].
    """
    return _run(q, k, v, cos, sin, positions, k_cache, v_cache, slot_mapping)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_target: KVCache,
    v_target: KVCache,
    slot_mapping: Tensor | None,
) -> Tensor:
    """`k_target`, `v_target`: caches; without a slot_mapping k_target is [T, Hkv, D], and no values are stored."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    for heads in (q, k, v):
        assert heads.stride()[1:] == (head_dim, 1)
    k_out, k_scales = numbers_and_scales(k_target)
    v_out, v_scales = numbers_and_scales(v_target)
    assert k_out.stride() == v_out.stride()
    assert k_out.stride()[-2:] == (head_dim, 1)
    has_scales = k_scales is not None and v_scales is not None
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    _rope_kernel[(num_tokens,)](
        q,
        k,
        v,
        out,
        k_out,
        v_out,
        k_scales if has_scales else k_out,
        v_scales if has_scales else v_out,
        cos,
        sin,
        positions,
        positions if slot_mapping is None else slot_mapping,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        k_out.stride(0),
        k_scales.stride(0) if k_scales is not None else 0,
        num_heads,
        num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=1 if slot_mapping is None else k_out.shape[1],
        HAS_CACHE=slot_mapping is not None,
        HAS_SCALES=has_scales,
        Q_HEADS=triton.next_power_of_2(num_heads),
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK=triton.next_power_of_2(head_dim // 2),
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rope_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    block_stride: tl.tensor,
    scale_stride: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    position = tl.load(positions + token).to(tl.int64)
    cos_row = tl.load(cos + position * HALF + columns, mask=columns < HALF, other=0.0)[None, :]
    sin_row = tl.load(sin + position * HALF + columns, mask=columns < HALF, other=0.0)[None, :]
    slot = token
    if HAS_CACHE:
        slot = tl.load(slot_mapping + token)

    heads = tl.arange(0, Q_HEADS)[:, None]
    within = heads * (2 * HALF) + columns[None, :]
    is_inside = (heads < num_heads) & (columns < HALF)[None, :]
    first, second = _halves(q + token * q_stride, within, is_inside, HALF)
    first, second = _rotated(first, second, cos_row, sin_row)
    target = q_out + token * num_heads * (2 * HALF) + within
    tl.store(target, first, mask=is_inside)
    tl.store(target + HALF, second, mask=is_inside)

    heads = tl.arange(0, KV_HEADS)
    within = heads[:, None] * (2 * HALF) + columns[None, :]
    is_inside = (heads < num_kv_heads)[:, None] & (columns < HALF)[None, :]
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = block * block_stride + offset * num_kv_heads * (2 * HALF) + within
    scale_at = block * scale_stride + offset * num_kv_heads + heads
    is_head = heads < num_kv_heads
    first, second = _halves(k + token * k_stride, within, is_inside, HALF)
    first, second = _rotated(first, second, cos_row, sin_row)
    _store(k_out + at, k_scales + scale_at, first, second, is_inside, is_head, HALF, HAS_SCALES)
    if HAS_CACHE:
        first, second = _halves(v + token * v_stride, within, is_inside, HALF)
        _store(v_out + at, v_scales + scale_at, first, second, is_inside, is_head, HALF, HAS_SCALES)


@triton.jit
def _halves(source: tl.tensor, within: tl.tensor, is_inside: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """Both halves of each head's dimensions, [heads, BLOCK]."""
    first = tl.load(source + within, mask=is_inside, other=0.0)
    return first, tl.load(source + within + HALF, mask=is_inside, other=0.0)


@triton.jit
def _rotated(first: tl.tensor, second: tl.tensor, cos_row: tl.tensor, sin_row: tl.tensor) -> tl.tensor:
    """Dimension i turns with i + D/2."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    return (x * cos_row - y * sin_row).to(first.dtype), (y * cos_row + x * sin_row).to(first.dtype)


@triton.jit
def _store(
    target: tl.tensor,
    scales: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    is_inside: tl.tensor,
    is_head: tl.tensor,
    HALF: tl.constexpr,
    HAS_SCALES: tl.constexpr,
) -> None:
    """Both halves of each head, at `target` and behind it; quantised, if there are places for scales."""
    if HAS_SCALES:
        IS_INT8: tl.constexpr = target.dtype.element_ty == tl.int8
        x, y = first.to(tl.float32), second.to(tl.float32)
        peak = peaks(x, y)
        tl.store(scales, scales_of(peak, IS_INT8), mask=is_head)
        tl.store(target, quantized(x, peak, IS_INT8), mask=is_inside)
        tl.store(target + HALF, quantized(y, peak, IS_INT8), mask=is_inside)
    else:
        tl.store(target, first, mask=is_inside)
        tl.store(target + HALF, second, mask=is_inside)
