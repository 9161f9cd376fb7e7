"""Attention by the native library, on the CPU: block tables are read directly, decode rows and prefill chunks at once.

Owns: the checks that the C functions rely on, and their workspace. Never does: arithmetic; `native/attention.h` says
how that goes, and what it promises: a query's result depends on its context alone, bit by bit.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from procengine.kernels.attention.metadata import AttentionMetadata
from procengine.kernels.kv_cache import native as kv_cache
from procengine.kernels.native import library
from procengine.kernels.native.arguments import argument_structure
from procengine.kernels.native.torch_dtypes import DTYPES, KV_CACHE_DTYPES

__all__ = ["paged_attention", "varlen_attention", "why_not"]

_MAX_GROUP = 64
_ALIGNMENT = 64
_VARLEN_BLOCK_SIZE = 64

_Arguments = argument_structure(
    "AttentionArgs",
    "q out keys values query_start_loc seq_lens block_tables workspace",
    "q_stride out_stride table_stride",
    "num_rows num_heads num_kv_heads head_dim block_size sliding_window is_causal q_dtype kv_dtype num_threads",
    "scale",
)


def why_not(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot run these shapes; None where it can."""
    if num_heads % num_kv_heads or num_heads // num_kv_heads > _MAX_GROUP:
        limit = f"a multiple of num_kv_heads, at most {_MAX_GROUP} times"
        return f"num_heads must be {limit}, not {num_heads} (num_kv_heads is {num_kv_heads})"
    return kv_cache.why_not(head_dim, block_size, dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """As the reference, from a cache that the native `write_kv` filled: within a block the order is its own.

    q: [T, H, D], float32 or bfloat16, and may be a slice of the fused q|k|v projection; k_cache, v_cache: contiguous,
    float32 or bfloat16, not necessarily of q's dtype, or int8 ([num_blocks, block_size, Hkv, D + 4]), which queries are
    rounded to meet. Returns [T, H, D] in q's dtype.
    """
    return _attend(
        q,
        k_cache,
        v_cache,
        meta.query_start_loc,
        meta.seq_lens,
        meta.block_tables,
        max_seq_len=meta.max_seq_len,
        scale=scale,
        causal=True,
        sliding_window=sliding_window,
    )


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
) -> Tensor:
    """As the reference. Keys and values are copied into a cache that lasts as long as the call."""
    lengths = query_start_loc.diff()
    blocks_of = (lengths + _VARLEN_BLOCK_SIZE - 1) // _VARLEN_BLOCK_SIZE
    first_blocks = blocks_of.cumsum(0, dtype=torch.int32) - blocks_of
    shape = (int(blocks_of.sum()), _VARLEN_BLOCK_SIZE, *k.shape[1:])
    k_cache, v_cache = torch.empty(shape, dtype=k.dtype), torch.empty(shape, dtype=v.dtype)
    within = torch.arange(k.shape[0]) - query_start_loc[:-1].repeat_interleave(lengths)
    kv_cache.write_kv(k, v, k_cache, v_cache, first_blocks.repeat_interleave(lengths) * _VARLEN_BLOCK_SIZE + within)
    most_blocks = -(-max_query_len // _VARLEN_BLOCK_SIZE)
    return _attend(
        q,
        k_cache,
        v_cache,
        query_start_loc,
        lengths,
        first_blocks[:, None] + torch.arange(most_blocks, dtype=torch.int32),
        max_seq_len=max_query_len,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
    )


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    *,
    max_seq_len: int,
    scale: float,
    causal: bool,
    sliding_window: int | None,
) -> Tensor:
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    reason = why_not(num_heads, num_kv_heads, head_dim, block_size, k_cache.dtype)
    assert reason is None, reason
    assert v_cache.shape == k_cache.shape
    assert kv_cache.head_dim_of(k_cache) == head_dim
    assert v_cache.dtype == k_cache.dtype
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert q.stride()[1:] == (head_dim, 1)
    assert scale > 0
    assert causal or sliding_window is None, "a sliding window needs causal attention"
    for indices in (query_start_loc, seq_lens, block_tables):
        assert indices.dtype == torch.int32
        assert indices.stride(-1) == 1
    out = torch.empty(q.shape, dtype=q.dtype)
    arguments = _Arguments(
        q=q.data_ptr(),
        out=out.data_ptr(),
        keys=k_cache.data_ptr(),
        values=v_cache.data_ptr(),
        query_start_loc=query_start_loc.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        block_tables=block_tables.data_ptr(),
        q_stride=q.stride(0),
        out_stride=out.stride(0),
        table_stride=block_tables.stride(0),
        num_rows=seq_lens.shape[0],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        sliding_window=sliding_window or 0,
        is_causal=causal,
        q_dtype=DTYPES[q.dtype],
        kv_dtype=KV_CACHE_DTYPES[k_cache.dtype],
        num_threads=library.num_threads(),
        scale=scale,
    )
    run, measure = _functions()
    arguments.workspace = _workspace(measure(ctypes.byref(arguments), max_seq_len))
    run(ctypes.byref(arguments))
    return out


@cache
def _functions() -> tuple[Any, Any]:
    pointer = ctypes.POINTER(_Arguments)
    run = library.native_function("pe_attention", None, pointer)
    return run, library.native_function("pe_attention_workspace", ctypes.c_int64, pointer, ctypes.c_int64)


_local = threading.local()


def _workspace(num_bytes: int) -> int:
    """The address of so many bytes, the calling thread's own until its next call."""
    kept: Tensor | None = getattr(_local, "workspace", None)
    if kept is None or kept.numel() < num_bytes + _ALIGNMENT:
        kept = _local.workspace = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    return -(-kept.data_ptr() // _ALIGNMENT) * _ALIGNMENT
