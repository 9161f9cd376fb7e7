"""Attention of rows with many queries in Triton: over the paged cache, or within packed sequences.

Owns: the kernel and its launch. Never does: wait for the device.

A program takes a tile of a row's queries and one head, and walks over the keys that any of them may see. The launch has
as many tiles for each row as the longest one needs; those beyond a row's end stop at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from procengine.kernels.attention.triton_tiles import accumulate, scores
from procengine.kernels.kv_cache.quantized import KVCache, numbers_and_scales
from procengine.kernels.kv_cache.triton_quantize import as_floats

__all__ = ["prefill_attention"]

_BLOCK_M = 64
_MAX_BLOCK_N = 64
_MIN_DOT = 16


def prefill_attention(
    q: Tensor,
    k: KVCache,
    v: KVCache,
    query_start_loc: Tensor,
    out: Tensor,
    *,
    seq_lens: Tensor | None,
    block_tables: Tensor | None,
    max_query_len: int,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    """Fills the rows' part of `out`, [T, H, D].

    q: [T, H, D]; query_start_loc: int32 [R+1], of the rows to compute. With `seq_lens`, int32 [R], and `block_tables`,
    int32 [R, blocks], k and v are the cache, [num_blocks, block_size, Hkv, D], and a row's queries are the last ones of
    its context. Without them k and v are [T, Hkv, D], packed like q.
    """
    num_heads, head_dim = q.shape[1:]
    is_paged = seq_lens is not None and block_tables is not None
    num_kv_heads = k.shape[-2]
    keys, key_scales = numbers_and_scales(k)
    values, value_scales = numbers_and_scales(v)
    assert q.stride()[1:] == (head_dim, 1)
    assert keys.stride()[-2:] == values.stride()[-2:] == (head_dim, 1)
    assert keys.stride() == values.stride()
    has_scales = key_scales is not None and value_scales is not None
    assert is_paged or not has_scales
    num_rows = query_start_loc.shape[0] - 1
    block_d = max(_MIN_DOT, triton.next_power_of_2(head_dim))
    row_bytes = block_d * q.element_size()
    is_wide = row_bytes > 256
    grid = (triton.cdiv(max_query_len, _BLOCK_M), num_heads, num_rows)
    _prefill_kernel[grid](
        q,
        keys,
        values,
        key_scales if has_scales else keys,
        value_scales if has_scales else values,
        query_start_loc,
        seq_lens if is_paged else query_start_loc,
        block_tables if is_paged else query_start_loc,
        out,
        q.stride(0),
        keys.stride(-3),
        keys.stride(0),
        key_scales.stride(0) if key_scales is not None else 0,
        out.stride(0),
        block_tables.stride(0) if block_tables is not None else 0,
        scale,
        sliding_window or 0,
        softcap or 1.0,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k.shape[1] if is_paged else 1,
        HAS_SCALES=has_scales,
        IS_PAGED=is_paged,
        IS_CAUSAL=causal,
        HAS_SOFTCAP=softcap is not None,
        BLOCK_M=_BLOCK_M,
        # Keys and values in flight fit into shared memory, a tile into registers (compiled for 9.0); float32 takes more
        # of both, for the parts that its products are made of.
        BLOCK_N=max(_MIN_DOT, min(_MAX_BLOCK_N, (1 << (14 if q.element_size() == 4 else 15)) // row_bytes)),
        BLOCK_D=block_d,
        num_warps=8 if is_wide else 4,
        num_stages=2 if is_wide else 3,
    )


# The named arguments lie anywhere in a step's payload: each alignment, and each number, would be a compilation.
@triton.jit(do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_tables"])
def _prefill_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    out: tl.tensor,
    q_stride: tl.tensor,
    kv_stride: tl.tensor,
    block_stride: tl.tensor,
    scale_stride: tl.tensor,
    out_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_PAGED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = tl.load(query_start_loc + row).to(tl.int64)
    num_queries = tl.load(query_start_loc + row + 1).to(tl.int64) - begin
    length = num_queries
    if IS_PAGED:
        length = tl.load(seq_lens + row).to(tl.int64)
    first_query = tile * BLOCK_M
    if first_query < num_queries:
        kv_head = head // GROUP
        members = first_query + tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_D)
        is_column = columns < HEAD_DIM
        is_query = (members < num_queries)[:, None] & is_column[None, :]
        tokens = (begin + members)[:, None]
        queries = tl.load(q + tokens * q_stride + head * HEAD_DIM + columns[None, :], mask=is_query, other=0.0)
        own = length - num_queries + members  # positions of the queries
        lowest, end = length * 0, length
        if IS_CAUSAL:
            end = tl.minimum(length, length - num_queries + first_query + BLOCK_M)
        if window > 0:
            lowest = tl.maximum(lowest, length - num_queries + first_query - window + 1)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(lowest // BLOCK_N * BLOCK_N, end, BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            is_there = (positions >= lowest) & (positions < end)
            places = (begin + positions) * kv_stride + kv_head * HEAD_DIM
            blocks = positions
            if IS_PAGED:
                blocks = tl.load(block_tables + row * table_stride + positions // BLOCK_SIZE, mask=is_there, other=0)
                blocks = blocks.to(tl.int64)
                places = blocks * block_stride + positions % BLOCK_SIZE * kv_stride + kv_head * HEAD_DIM
            is_loaded = is_there[:, None] & is_column[None, :]  # what lies beyond may be another request's NaN
            keys = tl.load(k + places[:, None] + columns[None, :], mask=is_loaded, other=0.0)
            values = tl.load(v + places[:, None] + columns[None, :], mask=is_loaded, other=0.0)
            is_seen = is_there[None, :] & (members < num_queries)[:, None]
            if IS_CAUSAL:
                is_seen = is_seen & (positions[None, :] <= own[:, None])
            if window > 0:
                is_seen = is_seen & (positions[None, :] > own[:, None] - window)
            keys, values = as_floats(keys, queries.dtype), as_floats(values, queries.dtype)
            key_scale, value_scale = scale, scale
            if HAS_SCALES:
                scale_places = blocks * scale_stride + positions % BLOCK_SIZE * (kv_stride // HEAD_DIM) + kv_head
                key_scale = scale * tl.load(k_scales + scale_places, mask=is_there, other=0.0)[None, :]
                value_scale = tl.load(v_scales + scale_places, mask=is_there, other=0.0)
            score = scores(queries, tl.trans(keys), key_scale, softcap, HAS_SOFTCAP)
            acc, highest, total = accumulate(acc, highest, total, score, is_seen, values, value_scale, HAS_SCALES)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + tokens * out_stride + head * HEAD_DIM + columns[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=is_query)
