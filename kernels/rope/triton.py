"""Rotary position embedding in Triton, and the write of keys and values to the cache that follows it.

Owns: the kernel and its launch. Never does: make the tables, change q, k or v in place, or wait for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """The rotated queries; rotated keys, and values, are stored at their slots. As `apply_rope` and `write_kv`.

    q: [T, H, D]; k, v: [T, Hkv, D], which may be slices of the fused projection; the caches: [num_blocks, block_size,
    Hkv, D], contiguous; slot_mapping: int64 [T]. Returns [T, H, D].
    """
    return _run(q, k, v, cos, sin, positions, k_cache, v_cache, slot_mapping)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    slot_mapping: Tensor | None,
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    for heads in (q, k, v):
        assert heads.stride()[1:] == (head_dim, 1)
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
        cos,
        sin,
        positions,
        positions if slot_mapping is None else slot_mapping,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        num_heads,
        num_kv_heads,
        HALF=head_dim // 2,
        HAS_CACHE=slot_mapping is not None,
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
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    HALF: tl.constexpr,
    HAS_CACHE: tl.constexpr,
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
    _rotate(q + token * q_stride, q_out + token * num_heads * (2 * HALF), within, is_inside, cos_row, sin_row, HALF)

    heads = tl.arange(0, KV_HEADS)[:, None]
    within = heads * (2 * HALF) + columns[None, :]
    is_inside = (heads < num_kv_heads) & (columns < HALF)[None, :]
    size = num_kv_heads * (2 * HALF)
    _rotate(k + token * k_stride, k_out + slot * size, within, is_inside, cos_row, sin_row, HALF)
    if HAS_CACHE:
        first = tl.load(v + token * v_stride + within, mask=is_inside)
        second = tl.load(v + token * v_stride + within + HALF, mask=is_inside)
        tl.store(v_out + slot * size + within, first, mask=is_inside)
        tl.store(v_out + slot * size + within + HALF, second, mask=is_inside)


@triton.jit
def _rotate(
    source: tl.tensor,
    target: tl.tensor,
    within: tl.tensor,
    is_inside: tl.tensor,
    cos_row: tl.tensor,
    sin_row: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    """Dimension i turns with i + D/2."""
    first = tl.load(source + within, mask=is_inside, other=0.0)
    second = tl.load(source + within + HALF, mask=is_inside, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    tl.store(target + within, (x * cos_row - y * sin_row).to(first.dtype), mask=is_inside)
    tl.store(target + within + HALF, (y * cos_row + x * sin_row).to(first.dtype), mask=is_inside)
