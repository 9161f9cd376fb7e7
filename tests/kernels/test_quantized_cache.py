"""A KV cache of 8 bits in plain torch: where its parts lie, what it keeps, and attention over it."""

from __future__ import annotations

import pytest
import torch

from procengine.kernels.attention import paged_attention
from procengine.kernels.kv_cache.quantized import QuantizedKind, open_cache
from procengine.kernels.kv_cache.reference import quantize, read_blocks, write_kv
from tests.kernels.quantized_cases import DTYPES, KINDS, empty_cache, make_quantized, rounded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 16, 8, 128), (2, 5, 3, 20), (1, 1, 1, 4)])
def test_numbers_and_scales_fill_each_block_and_share_nothing(
    shape: tuple[int, int, int, int], kind: QuantizedKind
) -> None:
    memory = torch.zeros((*shape[:3], shape[3] + 4), dtype=torch.int8)
    cache = open_cache(memory, kind)
    assert cache.shape == shape
    cache.numbers.view(torch.int8).fill_(1)
    cache.scales.view(torch.int32).fill_(0x02020202)
    blocks, end = memory.view(shape[0], -1), shape[1] * shape[2] * shape[3]
    assert bool((blocks[:, :end] == 1).all())
    assert bool((blocks[:, end:] == 2).all())


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.5 / 127), ("fp8", 1 / 16)])
def test_what_is_kept_is_off_by_half_a_step(kind: QuantizedKind, most: float) -> None:
    """Of int8 a step is the same for all; of e4m3, with 3 bits behind the first, it grows with the number."""
    heads = torch.randn(500, 3, 64) * 10 ** torch.linspace(-20, 20, 500)[:, None, None]
    numbers, scales = quantize(heads, DTYPES[kind])
    assert numbers.dtype == DTYPES[kind]
    peak = heads.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(numbers.float().abs().amax(-1) * scales.squeeze(-1), peak.squeeze(-1), rtol=1e-6, atol=0)
    allowed = most * (peak if kind == "int8" else heads.abs() + peak * 2**-9)
    assert bool(((numbers.float() * scales - heads).abs() <= 1.001 * allowed).all())


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_and_nan_stays_visible(kind: QuantizedKind) -> None:
    assert torch.equal(rounded(torch.zeros(2, 8), kind), torch.zeros(2, 8))
    assert bool(rounded(torch.tensor([[1.0, torch.nan, 0.0, 2.0]]), kind).isnan().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slots_hold_what_was_written_and_no_others_change(kind: QuantizedKind, dtype: torch.dtype) -> None:
    fused = torch.randn(5, 6, 12).to(dtype)
    _, k, v = fused.split(2, dim=1)
    keys, values = (empty_cache((3, 4, 2, 12), kind) for _ in range(2))
    slots = torch.tensor([11, 0, 7, 3, 4])
    write_kv(k, v, keys, values, slots)
    for cache, heads in ((keys, k), (values, v)):
        read = read_blocks(cache, torch.arange(3, dtype=torch.int32), dtype).flatten(0, 1)
        assert read.dtype == dtype
        assert torch.equal(read[slots], rounded(heads, kind).to(dtype))
        assert int(read.isnan().all(-1).all(-1).sum()) == 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 1.5), (100, None)])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "heads", "head_dim", "block_size"),
    [
        ([1], [1], (1, 1), 4, 1),
        ([1, 1, 1], [3, 70, 16], (6, 2), 8, 16),
        ([1, 1, 5, 70, 9], [6, 140, 5, 100, 10], (9, 3), 12, 7),
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
    floats = case.floats
    out = paged_attention(floats.q, case.keys, case.values, floats.meta, 0.3, window, softcap)
    torch.testing.assert_close(out, floats.expected(0.3, window, softcap), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision_stays_close(dtype: torch.dtype, kind: QuantizedKind) -> None:
    case = make_quantized(kind, [1, 1, 6], [30, 90, 12])
    floats = case.floats
    out = paged_attention(floats.q.to(dtype), case.keys, case.values, floats.meta, 0.3)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), floats.expected(0.3, None), atol=3e-2, rtol=3e-2)
