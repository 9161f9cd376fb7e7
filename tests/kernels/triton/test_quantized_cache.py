"""A KV cache of 8 bits in Triton: what is written is the reference's, bit by bit; attention is over what that holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from procengine.kernels.attention import triton as attention
from procengine.kernels.attention import triton_decode
from procengine.kernels.kv_cache import reference as kv_cache_reference
from procengine.kernels.kv_cache import triton as kv_cache
from procengine.kernels.kv_cache.quantized import QuantizedKind
from procengine.kernels.rope import RopeSpec, make_rotary_table
from procengine.kernels.rope import triton as rope
from tests.kernels.quantized_cases import KINDS, QuantizedCase, empty_cache, make_quantized

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def attend(case: QuantizedCase, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
    return attention.paged_attention(case.floats.q, case.keys, case.values, case.floats.meta, 0.3, window, softcap)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Both zeros are one."""
    return (torch.where(tensor == 0, 0, tensor.float())).view(torch.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [((1, 1), 4, 1), ((9, 3), 48, 5), ((8, 2), 64, 16)])
def test_what_is_written_is_the_references(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype, kind: QuantizedKind
) -> None:
    fused = torch.randn(7, heads[0] + 2 * heads[1], head_dim).to(dtype)
    q, k, v = fused.split((heads[0], heads[1], heads[1]), dim=1)
    fused[3] *= 1e-3
    fused[4] = 0.0
    table = make_rotary_table(RopeSpec(head_dim), 100)
    cos, sin = torch.from_numpy(table.cos), torch.from_numpy(table.sin)
    positions = torch.randint(0, 100, (7,), dtype=torch.int32)
    rotated_q, rotated_k = rope.apply_rope(q, k, cos, sin, positions)
    slots = torch.randperm(8 * block_size)[:7]
    caches = [empty_cache((8, block_size, heads[1], head_dim), kind) for _ in range(6)]
    kv_cache_reference.write_kv(rotated_k, v, caches[0], caches[1], slots)
    q_again = rope.rope_and_write_kv(q, k, v, cos, sin, positions, caches[2], caches[3], slots)
    kv_cache.write_kv(rotated_k, v, caches[4], caches[5], slots)
    assert torch.equal(q_again, rotated_q)
    for index, cache in enumerate(caches[2:]):
        expected = caches[index % 2]
        assert torch.equal(bits(cache.numbers), bits(expected.numbers))
        assert torch.equal(bits(cache.scales), bits(expected.scales))


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # the interpreter's, of NaN to int8
@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_visible_in_its_head_alone(kind: QuantizedKind) -> None:
    k, v = torch.ones(2, 3, 2, 8)
    k[1, 0, 5] = torch.nan
    keys, values = (empty_cache((1, 4, 2, 8), kind) for _ in range(2))
    kv_cache.write_kv(k, v, keys, values, torch.arange(3))
    assert keys.scales[0, :3].isnan().tolist() == [[False, False], [True, False], [False, False]]
    assert not bool(values.scales[0, :3].isnan().any())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 1.5)])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "heads", "head_dim", "block_size"),
    [
        ([1], [1], (1, 1), 4, 1),
        ([1, 1, 1, 1], [3, 70, 64, 65], (6, 2), 8, 4),
        ([1, 1, 5, 70, 9], [6, 140, 5, 100, 10], (9, 3), 20, 7),
        ([1, 4], [33, 16], (20, 1), 80, 16),
    ],
)
def test_attention_is_that_over_the_numbers_it_holds(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    kind: QuantizedKind,
) -> None:
    case = make_quantized(kind, query_lens, seq_lens, heads, head_dim, block_size, window)
    expected = case.floats.expected(0.3, window, softcap)
    torch.testing.assert_close(attend(case, window, softcap), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 40])
def test_a_context_in_splits_is_joined_and_no_bit_depends_on_who_computes_them(
    monkeypatch: pytest.MonkeyPatch, window: int | None, kind: QuantizedKind
) -> None:
    monkeypatch.setattr(triton_decode, "_MIN_SPLIT", 64)
    case = make_quantized(kind, [1, 1, 1, 1], [1, 64, 65, 300], window=window)
    found = attend(case, window)
    torch.testing.assert_close(found, case.floats.expected(0.3, window), atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(triton_decode, "_ENOUGH_PROGRAMS", 1)
    meta = case.floats.meta
    capacity = meta.block_tables.shape[1] * case.keys.shape[1]
    case.floats.meta = replace(meta, max_seq_len=capacity)  # as in a captured graph
    assert torch.equal(attend(case, window), found)


# The interpreter cannot multiply bfloat16 matrices.
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_close_also_where_scales_are_small(kind: QuantizedKind, dtype: torch.dtype) -> None:
    case = make_quantized(kind, [1, 1, 6], [30, 90, 12])
    case.values.scales.mul_(1e-4)  # in float16, this times a small weight would be nothing
    case.floats.contexts = [(k, v * 1e-4) for k, v in case.floats.contexts]
    out = attention.paged_attention(case.floats.q.to(dtype), case.keys, case.values, case.floats.meta, 0.3)
    assert out.dtype == dtype
    expected = case.floats.expected(0.3, None)
    torch.testing.assert_close(out.float(), expected, atol=3e-6, rtol=3e-2)
