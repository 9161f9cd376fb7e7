"""Attention in plain torch: decode rows in batches, prefill rows one by one.

Owns: the arithmetic other backends are tested against. Never does: write to the cache, or keep anything between calls.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as functional
from torch import Tensor

from procengine.kernels import host_reads
from procengine.kernels.attention.metadata import AttentionMetadata
from procengine.kernels.kv_cache.quantized import KVCache
from procengine.kernels.kv_cache.reference import read_blocks

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
    """Causal attention of this step's queries over each row's cached context.

    q: [T, H, D]; k_cache, v_cache: [num_blocks, block_size, Hkv, D], of q's dtype or quantised, which already hold this
    step's keys and values; H is a multiple of Hkv. With a sliding window w, a query at position p sees positions
    p-w+1 .. p. With a softcap c, scores are c * tanh(score / c) (Gemma 2, arXiv:2408.00118).
    Returns [T, H, D] in q's dtype.
    """
    decodes = meta.num_decode_rows
    parts = []
    for rows, longest, shortest in _decode_groups(meta, k_cache.shape[1], on_host=host_reads.are_free(q)):
        tables, lengths = meta.block_tables[rows], meta.seq_lens[rows]
        seen = _seen(tables, lengths, longest, shortest, sliding_window, k_cache.shape[1])
        context = _gather_context(k_cache, v_cache, q.dtype, *seen)
        parts.append((rows, _decode(q[rows], *context, seen[1], seen[3], scale, sliding_window, softcap)))
    if decodes == q.shape[0] and len(parts) == 1 and isinstance(parts[0][0], slice):
        return parts[0][1]
    out = torch.empty_like(q)
    for rows, part in parts:
        out[rows] = part
    _prefill_rows(out, q, k_cache, v_cache, meta, scale, sliding_window, softcap)
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
    """Attention within each of R packed sequences, without a cache.

    q: [T, H, D]; k, v: [T, Hkv, D]; query_start_loc: int32 [R+1]; max_query_len: the longest of them (other backends
    size their launch by it). Returns [T, H, D] in q's dtype. A sliding window needs `causal`.
    """
    out = torch.empty_like(q)
    bounds = query_start_loc.tolist()
    for start, end in pairwise(bounds):
        out[start:end] = _attend(q[start:end], k[start:end], v[start:end], scale, causal, sliding_window, softcap)
    return out


def _decode_groups(meta: AttentionMetadata, block_size: int, on_host: bool) -> list[tuple[slice | Tensor, int, int]]:
    """Decode rows to gather together, as (rows, longest context, shortest context), every row once.

    On the host, rows of one group differ less than twofold in length, so that a long row does not make the short ones
    gather its padding. On a device the lengths are unknown without a sync: one group of all.
    """
    decodes = meta.num_decode_rows
    if decodes == 0:
        return []
    if not on_host:
        return [(slice(0, decodes), meta.max_seq_len, 0)]
    lengths: list[int] = meta.seq_lens[:decodes].tolist()
    if _num_blocks(max(lengths), block_size) <= 2 * _num_blocks(min(lengths), block_size):
        return [(slice(0, decodes), max(lengths), min(lengths))]
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault(_num_blocks(length, block_size).bit_length(), []).append(row)
    return [
        (torch.tensor(rows), max(lengths[row] for row in rows), min(lengths[row] for row in rows))
        for rows in groups.values()
    ]


def _num_blocks(length: int, block_size: int) -> int:
    return -(-length // block_size)


def _seen(
    tables: Tensor, lengths: Tensor, longest: int, shortest: int, window: int | None, block_size: int
) -> tuple[Tensor, Tensor, int, int]:
    """(tables, lengths, longest, shortest) of contexts without the blocks that a window has passed: those may be
    anybody's by now. What is left differs in length from row to row, not in its number of blocks."""
    if window is None or window >= longest:
        return tables, lengths, longest, shortest
    firsts = (lengths - window).clamp(min=0) // block_size
    num_blocks = _num_blocks(window - 1, block_size) + 1  # a window may begin anywhere in a block
    indices = firsts.unsqueeze(1) + torch.arange(num_blocks, device=lengths.device)
    seen = tables.gather(1, indices.clamp(max=tables.shape[1] - 1).long())
    return seen, lengths - firsts * block_size, num_blocks * block_size, min(shortest, window)


def _gather_context(
    k_cache: KVCache,
    v_cache: KVCache,
    dtype: torch.dtype,
    tables: Tensor,
    lengths: Tensor,
    longest: int,
    shortest: int,
) -> tuple[Tensor, Tensor]:
    """Copies of the rows' keys and values, [rows, L, Hkv, D], zero beyond each row's length.

    Zeroed, because what lies there may be another request's NaN, and a mask does not stop 0 * NaN.
    """
    block_size = k_cache.shape[1]
    blocks = tables[:, : _num_blocks(longest, block_size)]
    flat = blocks.reshape(-1)
    shape = (blocks.shape[0], blocks.shape[1] * block_size, *k_cache.shape[2:])
    keys, values = (read_blocks(cache, flat, dtype).view(shape) for cache in (k_cache, v_cache))
    if shortest < shape[1]:
        tail = torch.arange(shortest, shape[1], device=lengths.device)
        beyond = (tail >= lengths.unsqueeze(1))[:, :, None, None]
        keys[:, shortest:].masked_fill_(beyond, 0)
        values[:, shortest:].masked_fill_(beyond, 0)
    return keys, values


def _decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    shortest: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """One query a row. q: [rows, H, D]; keys, values: [rows, L, Hkv, D]; returns [rows, H, D].

    The G query heads that share a kv head stand in for the query dimension, so keys and values are never repeated.
    """
    rows, num_heads, head_dim = q.shape
    grouped = q.view(rows, keys.shape[2], num_heads // keys.shape[2], head_dim)
    mask = None
    if shortest < keys.shape[1] or sliding_window is not None:
        positions = torch.arange(keys.shape[1], device=q.device)
        ends = lengths.unsqueeze(1)
        mask = positions < ends
        if sliding_window is not None:
            mask &= positions >= ends - sliding_window
        mask = mask[:, None, None, :]
    out = _dot_product(grouped, keys.transpose(1, 2), values.transpose(1, 2), mask, scale, softcap)
    return out.reshape(rows, num_heads, head_dim)


def _prefill_rows(
    out: Tensor,
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    """Fill `out` for the rows after the decode rows. The one place where the reference waits for a device."""
    first = meta.num_decode_rows
    if first == meta.seq_lens.shape[0]:
        return
    bounds = meta.query_start_loc[first:].tolist()
    lengths = meta.seq_lens[first:].tolist()
    block_size = k_cache.shape[1]
    for row, length in enumerate(lengths):
        start, end = bounds[row], bounds[row + 1]
        passed = 0  # blocks that no query sees, and that may be anybody's by now
        if sliding_window is not None:
            passed = max(0, length - (end - start) - sliding_window + 1) // block_size
        blocks = meta.block_tables[first + row, passed : _num_blocks(length, block_size)]
        kept = length - passed * block_size
        keys, values = (read_blocks(cache, blocks, q.dtype).flatten(0, 1)[:kept] for cache in (k_cache, v_cache))
        out[start:end] = _attend(q[start:end], keys, values, scale, True, sliding_window, softcap)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """One sequence. q: [Tq, H, D], the last Tq positions of keys, values: [L, Hkv, D]; returns [Tq, H, D]."""
    num_queries, length = q.shape[0], keys.shape[0]
    windowed = sliding_window is not None and sliding_window < length
    whole = num_queries == length and not windowed and softcap is None
    mask = _causal_mask(num_queries, length, sliding_window, q.device) if causal and not whole else None
    heads = (q.transpose(0, 1).unsqueeze(0), keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0))
    return _dot_product(*heads, mask, scale, softcap, is_causal=causal and whole).squeeze(0).transpose(0, 1)


def _dot_product(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """q: [B, H, M, D]; keys, values: [B, Hkv, L, D]; mask: bool, broadcast to [B, H, M, L]; returns [B, H, M, D]."""
    group = q.shape[1] // keys.shape[1]
    if softcap is None:
        return functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=group != 1
        )
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = softcap * torch.tanh((q.float() @ keys.float().transpose(-1, -2)) * scale / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1).to(q.dtype) @ values


def _causal_mask(num_queries: int, length: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """bool [num_queries, length], true where a query may look; queries are the last positions."""
    query_positions = torch.arange(length - num_queries, length, device=device).unsqueeze(1)
    key_positions = torch.arange(length, device=device)
    mask = key_positions <= query_positions
    if sliding_window is not None:
        mask &= key_positions > query_positions - sliding_window
    return mask
