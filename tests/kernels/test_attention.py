"""Paged and packed attention against a double-precision loop over every query."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from procengine.kernels import host_reads
from procengine.kernels.attention import AttentionMetadata, paged_attention, varlen_attention


def attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, causal: bool = True) -> Tensor:
    """The definition. q: [Tq, H, D], the last positions of k, v: [L, Hkv, D]."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for token in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + token
        first = 0 if window is None else max(0, position - window + 1)
        end = position + 1 if causal else k.shape[0]
        for head in range(q.shape[1]):
            keys, values = (x[first:end, head // group].double() for x in (k, v))
            out[token, head] = (keys @ q[token, head].double() * scale).softmax(0) @ values
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

    def expected(self, scale: float, window: int | None) -> Tensor:
        queries = self.q.split(self.query_lens)
        return torch.cat([attend_one(q, k, v, scale, window) for q, (k, v) in zip(queries, self.contexts, strict=True)])


def make_case(
    query_lens: list[int], seq_lens: list[int], heads: tuple[int, int] = (6, 2), head_dim: int = 8, block_size: int = 4
) -> Case:
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


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [1]),
        ([1], [13]),
        ([1, 1, 1], [8, 8, 8]),
        ([1, 1, 1, 1, 1], [3, 70, 1, 5, 33]),
        ([7], [7]),
        ([3], [11]),
        ([1, 1, 5, 2, 9], [6, 40, 5, 17, 10]),
    ],
)
def test_paged_attention_matches_the_definition(query_lens: list[int], seq_lens: list[int], window: int | None) -> None:
    case = make_case(query_lens, seq_lens)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.meta, 0.3, window)
    torch.testing.assert_close(out, case.expected(0.3, window), atol=1e-5, rtol=1e-5)


def test_the_way_taken_on_a_device_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([1, 1, 5, 2, 9], [6, 40, 5, 17, 10])
    monkeypatch.setattr(host_reads, "are_free", lambda tensor: False)
    for window in (None, 3):
        out = paged_attention(case.q, case.k_cache, case.v_cache, case.meta, 0.3, window)
        torch.testing.assert_close(out, case.expected(0.3, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("head_dim", [6, 16])
def test_any_grouping_of_heads(heads: tuple[int, int], head_dim: int) -> None:
    case = make_case([1, 1, 4], [5, 9, 6], heads, head_dim, block_size=16)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.meta, 0.5)
    torch.testing.assert_close(out, case.expected(0.5, None), atol=1e-5, rtol=1e-5)


def test_a_chunk_of_one_token_may_stand_among_the_prefill_rows() -> None:
    case = make_case([5, 1], [5, 7])
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.meta, 0.3)
    torch.testing.assert_close(out, case.expected(0.3, None), atol=1e-5, rtol=1e-5)


def test_a_row_is_the_same_whatever_it_is_batched_with() -> None:
    case = make_case([1, 1, 1, 1], [3, 300, 17, 64])
    together = paged_attention(case.q, case.k_cache, case.v_cache, case.meta, 0.3)
    for row in range(4):
        alone = AttentionMetadata(
            num_decode_rows=1,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=case.meta.seq_lens[row : row + 1],
            block_tables=case.meta.block_tables[row : row + 1],
            slot_mapping=case.meta.slot_mapping[row : row + 1],
            max_query_len=1,
            max_seq_len=int(case.meta.seq_lens[row]),
        )
        out = paged_attention(case.q[row : row + 1], case.k_cache, case.v_cache, alone, 0.3)
        torch.testing.assert_close(out[0], together[row])


def test_bfloat16_stays_close_to_float32() -> None:
    case = make_case([1, 1, 6], [30, 9, 12])
    low = paged_attention(case.q.bfloat16(), case.k_cache.bfloat16(), case.v_cache.bfloat16(), case.meta, 0.3)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), case.expected(0.3, None), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None)])
def test_varlen_attention_matches_the_definition(causal: bool, window: int | None) -> None:
    lengths = [1, 7, 4]
    q, k, v = torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    start = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    out = varlen_attention(q, k, v, start, max(lengths), 0.3, causal, window)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    expected = torch.cat([attend_one(pq, pk, pv, 0.3, window, causal) for pq, pk, pv in parts])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
