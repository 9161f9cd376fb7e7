"""Attention over an int8 cache against the torch reference on the numbers that it holds, by each instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from procengine.kernels.attention import AttentionMetadata, native, reference
from procengine.kernels.kv_cache import native as native_cache
from procengine.kernels.kv_cache import reference as reference_cache
from procengine.kernels.native import library

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the native library is not built")

# Values are rounded to bfloat16 before they are multiplied where the CPU multiplies that, and probabilities.
TOLERANCES = {isa: 2e-5 if isa < library.Isa.AVX512 else 2e-2 for isa in library.Isa}


@pytest.fixture(params=list(library.Isa), ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[library.Isa]:
    if request.param > library.best_isa():
        pytest.skip(f"this CPU has no {request.param.name}")
    with library.forced_isa(request.param):
        yield request.param


@pytest.fixture(params=[1, 3], ids=["1-thread", "3-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = library.num_threads()
    library.set_num_threads(request.param)
    yield request.param
    library.set_num_threads(before)


def rounded(heads: Tensor) -> Tensor:
    integers, scales = reference_cache.quantize(heads)
    return integers.float() * scales


@dataclass
class Context:
    """Queries of all positions, keys and values."""

    q: Tensor  # [L, H, D]
    k: Tensor  # [L, Hkv, D]
    v: Tensor


def make_context(length: int, heads: tuple[int, int] = (6, 2), head_dim: int = 64) -> Context:
    k, v = torch.randn(2, length, heads[1], head_dim)
    return Context(2 * torch.randn(length, heads[0], head_dim), k, v)


def attend(
    rows: Sequence[tuple[Context, int, int]],
    block_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The last `query_len` of the first `seq_len` positions of each: by the kernel, and by the reference in float32.

    Blocks are shuffled; what no row wrote is the bits of NaN.
    """
    num_kv_heads, head_dim = rows[0][0].k.shape[1:]
    counts = [math.ceil(seq_len / block_size) for _, _, seq_len in rows]
    ids = iter((torch.randperm(sum(counts)) + 1).tolist())
    shape = (2, sum(counts) + 1, block_size, num_kv_heads)
    plain = torch.full((*shape, head_dim), torch.nan)
    caches = torch.full((*shape, head_dim + 4), -1, dtype=torch.int8)
    tables = torch.zeros(len(rows), max(counts) + 1, dtype=torch.int32)
    queries = []
    for row, (sequence, query_len, seq_len) in enumerate(rows):
        tables[row, : counts[row]] = torch.tensor([next(ids) for _ in range(counts[row])])
        positions = torch.arange(seq_len)
        slots = tables[row].long()[positions // block_size] * block_size + positions % block_size
        k, v = sequence.k[:seq_len].to(dtype), sequence.v[:seq_len].to(dtype)
        native_cache.write_kv(k, v, caches[0], caches[1], slots)
        reference_cache.write_kv(rounded(k), rounded(v), plain[0], plain[1], slots)
        queries.append(sequence.q[seq_len - query_len : seq_len])
    query_lens = [query_len for _, query_len, _ in rows]
    meta = AttentionMetadata(
        num_decode_rows=next((i for i, n in enumerate(query_lens) if n != 1), len(rows)),
        query_start_loc=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len for _, _, seq_len in rows], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_len for _, _, seq_len in rows),
    )
    q, scale = torch.cat(queries).to(dtype), head_dim**-0.5
    out = native.paged_attention(q, caches[0], caches[1], meta, scale, window)
    expected = reference.paged_attention(rounded(q), plain[0], plain[1], meta, scale, window)
    assert out.dtype == dtype
    return out, expected


def assert_close(out: Tensor, expected: Tensor, isa: library.Isa) -> None:
    tolerance = max(TOLERANCES[isa], 1e-2 if out.dtype == torch.bfloat16 else 0)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [1]),
        ([1, 1, 1, 1], [700, 3, 64, 65]),  # threads share the long one
        ([129, 1, 40], [129, 7, 333]),
    ],
    ids=str,
)
def test_matches_the_reference(
    query_lens: list[int], seq_lens: list[int], window: int | None, isa: library.Isa, threads: int
) -> None:
    rows = [(make_context(length), n, length) for n, length in zip(query_lens, seq_lens, strict=True)]
    for dtype in (torch.float32, torch.bfloat16):
        assert_close(*attend(rows, window=window, dtype=dtype), isa)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (64, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [4, 80, 256])
def test_any_heads(heads: tuple[int, int], head_dim: int, isa: library.Isa) -> None:
    rows = [(make_context(length, heads, head_dim), n, length) for n, length in ((1, 37), (9, 41))]
    assert_close(*attend(rows), isa)


@pytest.mark.parametrize("block_size", [2, 6, 48, 1024])
def test_any_even_block_size(block_size: int, isa: library.Isa) -> None:
    rows = [(make_context(131), 1, 131), (make_context(99), 30, 99)]
    for window in (None, 50):
        assert_close(*attend(rows, block_size, window), isa)


def test_every_length_of_a_context(isa: library.Isa) -> None:
    sequence = make_context(150, (3, 1))
    assert_close(
        *attend([(sequence, 1, length) for length in range(1, 151, 1 if isa > library.Isa.PORTABLE else 7)]), isa
    )


def test_a_result_depends_on_its_context_alone(isa: library.Isa) -> None:
    """Bit by bit the same, alone or in a batch, one token at a time or in chunks, on any number of threads."""
    length = 400
    sequence, *others = (make_context(n) for n in (length, 1, 90))
    before = library.num_threads()
    try:
        for window in (None, 300):
            whole, _ = attend([(sequence, length, length)], window=window)
            for threads, chunk in ((1, 1), (3, 130)):
                library.set_num_threads(threads)
                for end in (257, length):
                    rows = [(sequence, chunk, end), *((other, 1, len(other.k)) for other in others)]
                    alone, _ = attend(rows[:1], 32, window)
                    batched, _ = attend(rows, 6, window)
                    assert torch.equal(alone, whole[end - chunk : end]), (threads, chunk, end)
                    assert torch.equal(batched[:chunk], alone), (threads, chunk, end)
    finally:
        library.set_num_threads(before)


def test_zeros_and_the_largest_and_smallest_numbers(isa: library.Isa) -> None:
    for size in (0.0, 1e-35, 1e4):
        sequence = make_context(70)
        sequence.v *= size
        out, expected = attend([(sequence, 1, 70)])
        assert_close(out / max(size, 1e-30), expected / max(size, 1e-30), isa)


def test_nan_of_a_sequence_stays_visible_in_it(isa: library.Isa) -> None:
    good, bad = make_context(30), make_context(20)
    bad.q[-1] = torch.nan
    out, _ = attend([(bad, 1, 20), (good, 1, 30)])
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cache_holds_what_the_reference_quantises(dtype: torch.dtype, isa: library.Isa) -> None:
    tokens, block_size, heads, head_dim = 37, 6, 3, 20
    k, v = torch.randn(2, tokens, heads, head_dim).to(dtype)
    slots = torch.randperm(20 * block_size)[:tokens]
    caches = torch.zeros(2, 20, block_size, heads, head_dim + 4, dtype=torch.int8)
    native_cache.write_kv(k, v, caches[0], caches[1], slots)
    by_head = caches.view(2, 20, heads, -1)
    integers, scales = by_head.split((block_size * head_dim, block_size * 4), dim=3)
    keys = integers[0].view(20, heads, head_dim // 4, block_size, 4).permute(0, 3, 1, 2, 4) ^ -128
    values = integers[1].view(20, heads, block_size, head_dim).transpose(1, 2)
    floats = scales.contiguous().view(torch.float32).transpose(2, 3)  # [2, blocks, block_size, heads]
    for heads_of, found, own_scales in ((k, keys, floats[0]), (v, values, floats[1])):
        expected, expected_scales = reference_cache.quantize(heads_of)
        assert torch.equal(found.reshape(-1, heads, head_dim)[slots], expected)
        assert torch.equal(own_scales.reshape(-1, heads)[slots], expected_scales.squeeze(-1))


def test_what_cannot_run_is_named() -> None:
    assert "multiple of 4" in str(native.why_not(4, 2, 66, 16, torch.int8))
    assert native.why_not(4, 2, 64, 16, torch.int8) is None
