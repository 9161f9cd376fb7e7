"""Attention of rows with one query each over the paged cache, in Triton.

Owns: the two kernels and their launch. Never does: wait for the device.

A context is cut into splits of one fixed size, so that a few long rows occupy the whole device, and a second kernel
joins them ("flash-decoding"). The size depends on the block table's width and on nothing in the batch: a row's result
is the same, bit by bit, whatever it is computed with. How many programs share the splits of a row depends on the batch:
as many as occupy the device. Splits beyond a row's end cost next to nothing, so that a captured graph serves all
lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from procengine.kernels.attention.triton_tiles import accumulate, scores
from procengine.kernels.kv_cache.quantized import KVCache, numbers_and_scales
from procengine.kernels.kv_cache.triton_quantize import as_floats

__all__ = ["decode_attention"]

_MIN_SPLIT = 512
_MAX_SPLITS = 64
_BLOCK_N = 64
_ENOUGH_PROGRAMS = 2048  # to occupy any device
_MIN_DOT = 16  # the smallest side of a matrix product


def decode_attention(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    seq_lens: Tensor,
    block_tables: Tensor,
    out: Tensor,
    *,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    """Fills `out`, [R, H, D]. q: [R, H, D]; seq_lens: int32 [R]; block_tables: int32 [R, blocks]."""
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    assert q.stride()[1:] == (head_dim, 1)
    keys, key_scales = numbers_and_scales(k_cache)
    values, value_scales = numbers_and_scales(v_cache)
    assert keys.stride() == values.stride()
    assert keys.stride()[1:] == (num_kv_heads * head_dim, head_dim, 1)
    has_scales = key_scales is not None and value_scales is not None
    capacity = block_tables.shape[1] * block_size
    split = triton.cdiv(max(_MIN_SPLIT, triton.cdiv(capacity, _MAX_SPLITS)), _BLOCK_N) * _BLOCK_N
    num_splits = triton.cdiv(max_seq_len, split)
    is_whole = num_splits == 1
    partial = out if is_whole else torch.empty((num_splits, *q.shape), dtype=torch.float32, device=q.device)
    sums = torch.empty((num_splits, num_rows, num_heads), dtype=torch.float32, device=q.device)
    num_programs = min(num_splits, triton.cdiv(_ENOUGH_PROGRAMS, max(1, num_rows * num_kv_heads)))
    _decode_kernel[(num_rows, num_kv_heads, num_programs)](
        q,
        keys,
        values,
        key_scales if has_scales else sums,
        value_scales if has_scales else sums,
        seq_lens,
        block_tables,
        partial,
        sums,
        q.stride(0),
        keys.stride(0),
        key_scales.stride(0) if key_scales is not None else 0,
        partial.stride(-3),
        block_tables.stride(0),
        num_rows,
        num_heads,
        scale,
        sliding_window or 0,
        softcap or 1.0,
        split,
        num_splits,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_SCALES=has_scales,
        HAS_SOFTCAP=softcap is not None,
        IS_WHOLE=is_whole,
        BLOCK_M=max(_MIN_DOT, triton.next_power_of_2(group)),
        BLOCK_N=_BLOCK_N,
        BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(head_dim)),
    )
    if not is_whole:
        _join_kernel[(num_rows, num_heads)](
            partial,
            sums,
            out,
            out.stride(0),
            num_rows,
            num_heads,
            num_splits,
            HEAD_DIM=head_dim,
            BLOCK_S=triton.next_power_of_2(triton.cdiv(capacity, split)),  # sums have one order, whatever the batch
            BLOCK_D=triton.next_power_of_2(head_dim),
        )


# What differs from step to step is not to be a compilation each: numbers of rows and splits, and where lengths lie.
@triton.jit(do_not_specialize=["num_rows", "num_splits"], do_not_specialize_on_alignment=["seq_lens", "block_tables"])
def _decode_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor,
    scale_stride: tl.tensor,
    partial_stride: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    split: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq_len = tl.load(seq_lens + row)
    begin = seq_len * 0
    if window > 0:
        begin = tl.maximum(begin, seq_len - window)
    members = tl.arange(0, BLOCK_M)  # the query heads of this kv head
    columns = tl.arange(0, BLOCK_D)
    is_column = columns < HEAD_DIM
    heads = kv_head * GROUP + members
    is_query = (members < GROUP)[:, None] & is_column[None, :]
    queries = tl.load(q + row * q_stride + heads[:, None] * HEAD_DIM + columns[None, :], mask=is_query, other=0.0)
    num_kv_heads = num_heads // GROUP
    for part in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        lowest = tl.maximum(part * split, begin)
        last = tl.minimum(part * split + split, seq_len)
        log_sum = tl.full([BLOCK_M], float("-inf"), tl.float32)  # of a split in which there is nothing to see
        if lowest < last:
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for start in range(lowest // BLOCK_N * BLOCK_N, last, BLOCK_N):
                positions = start + tl.arange(0, BLOCK_N)
                is_seen = (positions >= lowest) & (positions < last)
                blocks = tl.load(block_tables + row * table_stride + positions // BLOCK_SIZE, mask=is_seen, other=0)
                within = positions % BLOCK_SIZE * num_kv_heads + kv_head
                places = blocks.to(tl.int64) * block_stride + within * HEAD_DIM
                is_loaded = is_seen[:, None] & is_column[None, :]  # what lies beyond may be another request's NaN
                keys = tl.load(k_cache + places[:, None] + columns[None, :], mask=is_loaded, other=0.0)
                values = tl.load(v_cache + places[:, None] + columns[None, :], mask=is_loaded, other=0.0)
                keys, values = as_floats(keys, queries.dtype), as_floats(values, queries.dtype)
                key_scale, value_scale = scale, scale
                if HAS_SCALES:
                    scale_places = blocks.to(tl.int64) * scale_stride + within
                    key_scale = scale * tl.load(k_scales + scale_places, mask=is_seen, other=0.0)[None, :]
                    value_scale = tl.load(v_scales + scale_places, mask=is_seen, other=0.0)
                score = scores(queries, tl.trans(keys), key_scale, softcap, HAS_SOFTCAP)
                acc, highest, total = accumulate(
                    acc, highest, total, score, is_seen[None, :], values, value_scale, HAS_SCALES
                )
            at = row * partial_stride
            if not IS_WHOLE:
                at = (part * num_rows + row) * partial_stride
            target = partial + at + heads[:, None] * HEAD_DIM + columns[None, :]
            tl.store(target, (acc / total[:, None]).to(partial.dtype.element_ty), mask=is_query)
            log_sum = highest + tl.log(total)
        if not IS_WHOLE:
            tl.store(sums + (part * num_rows + row) * num_heads + heads, log_sum, mask=members < GROUP)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _join_kernel(
    partial: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """The splits of a row, each with the logarithm of its sum of weights; one in which there was nothing has -inf."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts, columns = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    is_part, is_column = parts < num_splits, columns < HEAD_DIM
    places = (parts * num_rows + row) * num_heads + head
    log_sums = tl.load(sums + places, mask=is_part, other=float("-inf"))
    weights = tl.exp(log_sums - tl.max(log_sums, axis=0))
    is_loaded = (log_sums > float("-inf"))[:, None] & is_column[None, :]  # nothing was stored of the others
    results = tl.load(partial + places[:, None] * HEAD_DIM + columns[None, :], mask=is_loaded, other=0.0)
    joined = tl.sum(results * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    target = out + row * out_stride + head * HEAD_DIM + columns
    tl.store(target, joined.to(out.dtype.element_ty), mask=is_column)
