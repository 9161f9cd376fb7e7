"""Attention by flash-attn 2 (Dao 2023, arXiv:2307.08691), where that is installed.

Owns: how its arguments follow from ours. Never does: arithmetic, or wait for the device. `backends` says where it runs.
"""

from __future__ import annotations

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor, cat, empty_like
from torch.nn.functional import pad

from procengine.kernels.attention.metadata import AttentionMetadata

__all__ = ["paged_attention", "varlen_attention"]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As the reference."""
    decodes, parts = meta.num_decode_rows, []
    options = {"softmax_scale": scale, "causal": True, **_limits(sliding_window, softcap)}
    if decodes:
        out = flash_attn_with_kvcache(
            q[:decodes].unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=meta.seq_lens[:decodes],
            block_table=meta.block_tables[:decodes],
            **options,
        )
        parts.append(out.squeeze(1))
    if decodes < meta.seq_lens.shape[0]:
        ends = meta.seq_lens[decodes:].cumsum(0, dtype=meta.seq_lens.dtype)
        parts.append(
            flash_attn_varlen_func(
                q[decodes:],
                k_cache,
                v_cache,
                cu_seqlens_q=meta.query_start_loc[decodes:] - decodes,  # a decode row has one token
                cu_seqlens_k=pad(ends, (1, 0)),
                max_seqlen_q=meta.max_query_len,
                max_seqlen_k=meta.max_seq_len,
                block_table=meta.block_tables[decodes:],
                **options,
            )
        )
    if not parts:
        return empty_like(q)
    return parts[0] if len(parts) == 1 else cat(parts)


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
    """As the reference."""
    out: Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=query_start_loc,
        cu_seqlens_k=query_start_loc,
        max_seqlen_q=max_query_len,
        max_seqlen_k=max_query_len,
        softmax_scale=scale,
        causal=causal,
        **_limits(sliding_window, softcap),
    )
    return out


def _limits(sliding_window: int | None, softcap: float | None) -> dict[str, tuple[int, int] | float]:
    """A window of w is the position itself and w - 1 before it; -1 and 0 switch theirs off."""
    return {"window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, 0), "softcap": softcap or 0.0}
