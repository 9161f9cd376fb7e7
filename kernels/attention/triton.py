"""Attention in Triton: decode rows split over their context, prefill rows over their queries.

Owns: what runs where, and the workspace of a call. Never does: arithmetic; that is in the two kernels' modules.
"""

from __future__ import annotations

from torch import Tensor, empty_like

from procengine.kernels.attention.metadata import AttentionMetadata
from procengine.kernels.attention.triton_decode import decode_attention
from procengine.kernels.attention.triton_prefill import prefill_attention
from procengine.kernels.kv_cache.quantized import KVCache

__all__ = ["paged_attention", "varlen_attention"]


def paged_attention(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As the reference. q may be a slice of the fused projection."""
    out = empty_like(q)
    decodes = meta.num_decode_rows
    if decodes:
        decode_attention(
            q[:decodes],
            k_cache,
            v_cache,
            meta.seq_lens[:decodes],
            meta.block_tables[:decodes],
            out[:decodes],
            max_seq_len=meta.max_seq_len,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
        )
    if decodes < meta.seq_lens.shape[0]:
        prefill_attention(
            q,
            k_cache,
            v_cache,
            meta.query_start_loc[decodes:],
            out,
            seq_lens=meta.seq_lens[decodes:],
            block_tables=meta.block_tables[decodes:],
            max_query_len=meta.max_query_len,
            scale=scale,
            causal=True,
            sliding_window=sliding_window,
            softcap=softcap,
        )
    return out


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As the reference. q, k and v may be slices of the fused projection."""
    assert causal or sliding_window is None, "a sliding window needs causal attention"
    out = empty_like(q)
    if k.stride() != v.stride():  # keys have been turned, values are still a slice: one stride is to tell tokens apart
        k, v = k.contiguous(), v.contiguous()
    if q.shape[0]:
        prefill_attention(
            q,
            k,
            v,
            query_start_loc,
            out,
            seq_lens=None,
            block_tables=None,
            max_query_len=max_query_len,
            scale=scale,
            causal=causal,
            sliding_window=sliding_window,
            softcap=softcap,
        )
    return out
