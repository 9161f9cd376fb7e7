"""Triton attention against the definition: odd shapes, groups of heads, contexts across block and split borders."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from procengine.kernels.attention import reference, triton_decode
from procengine.kernels.attention import triton as attention
from procengine.kernels.attention.metadata import AttentionMetadata
from tests.kernels.attention_cases import Case, attend_one, make_case


def attend(case: Case, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
    return attention.paged_attention(case.q, case.k_cache, case.v_cache, case.meta, 0.3, window, softcap)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (3, 1.5), (100, None)])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [1]),
        ([1, 1, 1, 1, 1], [3, 70, 1, 64, 65]),
        ([7], [7]),
        ([3], [131]),
        ([1, 1, 5, 70, 9], [6, 140, 5, 100, 10]),
        ([5, 1], [5, 7]),
    ],
)
def test_paged_attention_matches_the_definition(
    query_lens: list[int], seq_lens: list[int], window: int | None, softcap: float | None
) -> None:
    case = make_case(query_lens, seq_lens, window=window)
    torch.testing.assert_close(attend(case, window, softcap), case.expected(0.3, window, softcap), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (8, 1), (20, 1)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(6, 16), (80, 1), (32, 7)])
def test_any_grouping_of_heads_and_any_block(heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    case = make_case([1, 1, 4], [5, 29, 16], heads, head_dim, block_size)
    torch.testing.assert_close(attend(case), case.expected(0.3, None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_a_context_in_splits_is_joined(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(triton_decode, "_MIN_SPLIT", 64)
    case = make_case([1, 1, 1, 1], [1, 64, 65, 300], window=window)  # short rows have splits that see nothing
    torch.testing.assert_close(attend(case, window), case.expected(0.3, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_who_computes_a_split_and_how_many_there_might_be_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(triton_decode, "_MIN_SPLIT", 64)
    case = make_case([1, 1, 1], [1, 65, 300])
    expected = attend(case, window)
    monkeypatch.setattr(triton_decode, "_ENOUGH_PROGRAMS", 1)
    assert torch.equal(attend(case, window), expected)
    capacity = case.meta.block_tables.shape[1] * case.k_cache.shape[1]
    case.meta = replace(case.meta, max_seq_len=capacity)  # as in a captured graph
    assert torch.equal(attend(case, window), expected)


def test_a_row_is_the_same_bit_by_bit_whatever_it_is_batched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "_MIN_SPLIT", 64)
    case = make_case([1, 1, 1], [3, 300, 70])
    together = attend(case)
    for row in range(3):
        alone = AttentionMetadata(
            num_decode_rows=1,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=case.meta.seq_lens[row : row + 1],
            block_tables=case.meta.block_tables[row : row + 1],
            slot_mapping=case.meta.slot_mapping[row : row + 1],
            max_query_len=1,
            max_seq_len=int(case.meta.seq_lens[row]),
        )
        out = attention.paged_attention(case.q[row : row + 1], case.k_cache, case.v_cache, alone, 0.3)
        assert torch.equal(out[0], together[row])


# The interpreter cannot multiply bfloat16 matrices.
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])])
def test_half_precision_stays_close_to_float32(dtype: torch.dtype) -> None:
    case = make_case([1, 1, 6], [30, 90, 12])
    out = attention.paged_attention(case.q.to(dtype), case.k_cache.to(dtype), case.v_cache.to(dtype), case.meta, 0.3)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), case.expected(0.3, None), atol=3e-2, rtol=3e-2)


def test_queries_may_be_a_slice_of_the_fused_projection() -> None:
    case = make_case([1, 6], [30, 12])
    expected = case.expected(0.3, None)
    fused = torch.cat((case.q, torch.randn(7, 4, 8)), dim=1)
    case.q = fused[:, :6]
    torch.testing.assert_close(attend(case), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("causal", "window", "softcap"), [(True, None, None), (True, 3, 1.5), (False, None, None)])
def test_varlen_attention_matches_the_definition(causal: bool, window: int | None, softcap: float | None) -> None:
    lengths = [1, 70, 4]
    q, k, v = torch.randn(75, 4, 8), torch.randn(75, 2, 8), torch.randn(75, 2, 8)
    start = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    out = attention.varlen_attention(q, k, v, start, max(lengths), 0.3, causal, window, softcap)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    expected = torch.cat([attend_one(pq, pk, pv, 0.3, window, causal, softcap) for pq, pk, pv in parts])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    again = reference.varlen_attention(q, k, v, start, max(lengths), 0.3, causal, window, softcap)
    torch.testing.assert_close(out, again, atol=1e-5, rtol=1e-5)
