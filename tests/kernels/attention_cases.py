"""Contexts of any shape, the same laid out in a paged cache, and attention by its definition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from procengine.kernels.attention import AttentionMetadata


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, causal: bool = True, softcap: float | None = None
) -> Tensor:
    """The definition. q: [Tq, H, D], the last positions of k, v: [L, Hkv, D]."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for token in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + token
        first = 0 if window is None else max(0, position - window + 1)
        end = position + 1 if causal else k.shape[0]
        for head in range(q.shape[1]):
            keys, values = (x[first:end, head // group].double() for x in (k, v))
            scores = keys @ q[token, head].double() * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            out[token, head] = scores.softmax(0) @ values
    return out.to(q.dtype)


@dataclass
class Case:
    """Random contexts and the same laid out in a cache, in blocks that are shuffled and surrounded by NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: AttentionMetadata
    contexts: list[tuple[Tensor, Tensor]]
    query_lens: list[int]

    def expected(self, scale: float, window: int | None, softcap: float | None = None) -> Tensor:
        queries = self.q.split(self.query_lens)
        parts = zip(queries, self.contexts, strict=True)
        return torch.cat([attend_one(q, k, v, scale, window, softcap=softcap) for q, (k, v) in parts])


def make_case(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 8,
    block_size: int = 4,
    window: int | None = None,
) -> Case:
    """Blocks that such a window has passed, of all of a row's queries, are NaN too."""
    num_heads, num_kv_heads = heads
    blocks_of = [math.ceil(length / block_size) for length in seq_lens]
    num_blocks = sum(blocks_of) + 2
    free = iter(torch.randperm(num_blocks - 1).add(1).tolist())  # block 0 is padding
    k_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), torch.nan)
    v_cache = k_cache.clone()
    tables = torch.zeros(len(seq_lens), max(blocks_of) + 1, dtype=torch.int32)
    contexts, slots = [], []
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        tables[row, : blocks_of[row]] = torch.tensor([next(free) for _ in range(blocks_of[row])])
        positions = torch.arange(seq_len)
        row_slots = tables[row].long()[positions // block_size] * block_size + positions % block_size
        k, v = torch.randn(2, seq_len, num_kv_heads, head_dim)
        k_cache.flatten(0, 1)[row_slots] = k
        v_cache.flatten(0, 1)[row_slots] = v
        passed = 0 if window is None else max(0, seq_len - query_len - window + 1) // block_size
        for cache in (k_cache, v_cache):
            cache[tables[row, :passed].long()] = torch.nan
        contexts.append((k, v))
        slots.append(row_slots[seq_len - query_len :])
    meta = AttentionMetadata(
        num_decode_rows=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
        query_start_loc=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    return Case(torch.randn(sum(query_lens), num_heads, head_dim), k_cache, v_cache, meta, contexts, query_lens)
