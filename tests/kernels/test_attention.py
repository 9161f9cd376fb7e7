"""Paged and packed attention against a double-precision loop over every query."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from procengine.kernels import host_reads
from procengine.kernels.attention import AttentionMetadata, paged_attention, varlen_attention
from tests.kernels.attention_cases import attend_one, make_case


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
    case = make_case(query_lens, seq_lens, window=window)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.meta, 0.3, window)
    torch.testing.assert_close(out, case.expected(0.3, window), atol=1e-5, rtol=1e-5)


def test_the_way_taken_on_a_device_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reads, "are_free", lambda tensor: False)
    for window in (None, 3):
        case = make_case([1, 1, 5, 2, 9], [6, 40, 5, 17, 10], window=window)
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


@pytest.mark.parametrize("window", [None, 3])
def test_softcap_matches_the_definition(window: int | None) -> None:
    case = make_case([1, 1, 5, 2, 9], [6, 40, 5, 17, 10])
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.meta, 0.9, window, softcap=1.5)
    torch.testing.assert_close(out, case.expected(0.9, window, softcap=1.5), atol=1e-5, rtol=1e-5)
