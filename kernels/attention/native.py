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
from procengine.kernels.native import library

__all__ = ["paged_attention", "varlen_attention", "why_not"]

_MAX_HEAD_DIM = 512
_MAX_GROUP = 64
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ALIGNMENT = 64
_WHOLE_SEQUENCE = 1 << 30  # as a block size: the block table of a packed sequence is the place where it starts

_POINTERS = ("q", "out", "keys", "values", "query_start_loc", "seq_lens", "block_tables", "workspace")
_STRIDES = ("q_stride", "out_stride", "block_stride", "token_stride", "head_stride", "table_stride")
_INTEGERS = (
    *("num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size"),
    *("sliding_window", "is_causal", "q_dtype", "kv_dtype"),
)


class _Arguments(ctypes.Structure):
    """`pe::AttentionArgs`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _INTEGERS),
        ("scale", ctypes.c_float),
    )


def why_not(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot run these shapes; None where it can."""
    if dtype not in _DTYPES:
        return f"attention in {dtype} is not written; there are float32 and bfloat16"
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        return f"head_dim must be even and at most {_MAX_HEAD_DIM}, not {head_dim}"
    if num_heads % num_kv_heads or num_heads // num_kv_heads > _MAX_GROUP:
        return f"num_heads must be a multiple of num_kv_heads, at most {_MAX_GROUP} times, not {num_heads} and {num_kv_heads}"
    return None


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """As the reference. q may be a slice of the fused q|k|v projection, and the caches may have any strides over
    blocks, tokens and heads, the same for both. float32 and bfloat16, also q in one and the cache in the other.
    """
    block_size = k_cache.shape[1]
    return _run(
        q,
        k_cache,
        v_cache,
        meta.query_start_loc,
        meta.seq_lens,
        meta.block_tables,
        block_size=block_size,
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
    """As the reference."""
    # A packed sequence is a block without end. Its table entry counts blocks of one token each.
    return _run(
        q,
        k.unsqueeze(1),
        v.unsqueeze(1),
        query_start_loc,
        query_start_loc.diff(),
        query_start_loc[:-1].unsqueeze(1),
        block_size=_WHOLE_SEQUENCE,
        max_seq_len=max_query_len,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
    )


def _run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    *,
    block_size: int,
    max_seq_len: int,
    scale: float,
    causal: bool,
    sliding_window: int | None,
) -> Tensor:
    """k_cache, v_cache: [blocks, tokens of a block, Hkv, D]."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    reason = why_not(num_heads, num_kv_heads, head_dim, q.dtype) or why_not(1, 1, head_dim, k_cache.dtype)
    assert reason is None, reason
    assert v_cache.dtype == k_cache.dtype
    assert v_cache.stride() == k_cache.stride()
    assert k_cache.stride(3) == 1
    assert q.stride(2) == 1
    assert q.stride(1) == head_dim
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
        block_stride=k_cache.stride(0),
        # Where a block is one endless sequence, its tokens are as far apart as the "blocks" that its place counts.
        token_stride=k_cache.stride(0 if block_size == _WHOLE_SEQUENCE else 1),
        head_stride=k_cache.stride(2),
        table_stride=block_tables.stride(0),
        num_rows=seq_lens.shape[0],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        sliding_window=sliding_window or 0,
        is_causal=causal,
        q_dtype=_DTYPES[q.dtype],
        kv_dtype=_DTYPES[k_cache.dtype],
        scale=scale,
    )
    run, measure = _functions()
    workspace = _workspace(measure(ctypes.byref(arguments), max_seq_len, library.num_threads()))
    arguments.workspace = -(-workspace.data_ptr() // _ALIGNMENT) * _ALIGNMENT
    run(ctypes.byref(arguments))
    return out


@cache
def _functions() -> tuple[Any, Any]:
    pointer = ctypes.POINTER(_Arguments)
    run = library.native_function("pe_attention", None, pointer)
    measure = library.native_function(
        "pe_attention_workspace", ctypes.c_int64, pointer, ctypes.c_int64, ctypes.c_int32
    )
    return run, measure


_local = threading.local()


def _workspace(num_bytes: int) -> Tensor:
    """The calling thread's, which grows to the largest asked for."""
    kept: Tensor | None = getattr(_local, "workspace", None)
    if kept is None or kept.numel() < num_bytes + _ALIGNMENT:
        kept = _local.workspace = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    return kept
