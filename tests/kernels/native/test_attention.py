"""Native attention against the torch reference, by each instruction set, and its promise: the same bits however cut."""

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

FLOAT, BF16 = torch.float32, torch.bfloat16
# Queries and probabilities may be rounded to bfloat16 (8 bits) before they are multiplied, and results are.
TOLERANCES = {FLOAT: 2e-5, BF16: 2e-2}


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


@dataclass
class Context:
    """One sequence's queries, all of them, and its keys and values."""

    q: Tensor  # [L, H, D]
    k: Tensor  # [L, Hkv, D]
    v: Tensor


def make_context(length: int, heads: tuple[int, int], head_dim: int) -> Context:
    num_heads, num_kv_heads = heads
    k, v = torch.randn(2, length, num_kv_heads, head_dim)
    # Peaked, so that a key in the wrong place shows.
    return Context(2 * torch.randn(length, num_heads, head_dim), k, v)


@dataclass
class Batch:
    """Chunks of contexts, the last `query_len` of the first `seq_len` positions, as the kernels take them."""

    q: Tensor
    caches: tuple[Tensor, Tensor]  # as native
    plain_caches: tuple[Tensor, Tensor]  # as the reference
    meta: AttentionMetadata
    scale: float

    def native(self, window: int | None = None) -> Tensor:
        return native.paged_attention(self.q, *self.caches, self.meta, self.scale, window)

    def reference(self, window: int | None = None) -> Tensor:
        k_cache, v_cache = (cache.float() for cache in self.plain_caches)
        return reference.paged_attention(self.q.float(), k_cache, v_cache, self.meta, self.scale, window)


def make_batch(
    rows: Sequence[tuple[Context, int, int]],
    block_size: int = 16,
    dtype: torch.dtype = FLOAT,
    cache_dtype: torch.dtype = FLOAT,
) -> Batch:
    """rows: (context, query_len, seq_len). Blocks are shuffled, what no row wrote is NaN."""
    num_kv_heads, head_dim = rows[0][0].k.shape[1:]
    counts = [math.ceil(seq_len / block_size) for _, _, seq_len in rows]
    ids = iter((torch.randperm(sum(counts)) + 1).tolist())
    plain = torch.full((2, sum(counts) + 1, block_size, num_kv_heads, head_dim), torch.nan, dtype=cache_dtype)
    caches = torch.full_like(plain, torch.nan)
    tables = torch.zeros(len(rows), max(counts) + 1, dtype=torch.int32)
    queries, slots = [], []
    for row, (context, query_len, seq_len) in enumerate(rows):
        tables[row, : counts[row]] = torch.tensor([next(ids) for _ in range(counts[row])])
        positions = torch.arange(seq_len)
        row_slots = tables[row].long()[positions // block_size] * block_size + positions % block_size
        k, v = context.k[:seq_len].to(cache_dtype), context.v[:seq_len].to(cache_dtype)
        reference_cache.write_kv(k, v, plain[0], plain[1], row_slots)
        native_cache.write_kv(k, v, caches[0], caches[1], row_slots)
        queries.append(context.q[seq_len - query_len : seq_len])
        slots.append(row_slots[seq_len - query_len :])
    query_lens = [query_len for _, query_len, _ in rows]
    meta = AttentionMetadata(
        num_decode_rows=next((i for i, n in enumerate(query_lens) if n != 1), len(rows)),
        query_start_loc=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len for _, _, seq_len in rows], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_len for _, _, seq_len in rows),
    )
    q = torch.cat(queries).to(dtype)
    return Batch(q, (caches[0], caches[1]), (plain[0], plain[1]), meta, head_dim**-0.5)


def random_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    **kwargs: object,
) -> Batch:
    rows = [
        (make_context(seq_len, heads, head_dim), n, seq_len) for n, seq_len in zip(query_lens, seq_lens, strict=True)
    ]
    return make_batch(rows, **kwargs)  # type: ignore[arg-type]


def pass_blocks(batch: Batch, window: int) -> None:
    """NaN in all blocks that no query of a row sees any more."""
    meta, block_size = batch.meta, batch.caches[0].shape[1]
    query_lens = meta.query_start_loc.diff().tolist()
    for table, query_len, seq_len in zip(meta.block_tables, query_lens, meta.seq_lens.tolist(), strict=True):
        passed = table[: max(0, seq_len - query_len - window + 1) // block_size].long()
        for cache in (*batch.caches, *batch.plain_caches):
            cache[passed] = torch.nan


def assert_matches(batch: Batch, window: int | None = None) -> None:
    out = batch.native(window)
    assert out.dtype == batch.q.dtype
    tolerance = max(TOLERANCES[batch.q.dtype], TOLERANCES[batch.caches[0].dtype])
    torch.testing.assert_close(out.float(), batch.reference(window), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize("block_size", [16, 64])
def test_what_a_window_has_passed_may_be_anything(block_size: int, dtype: torch.dtype) -> None:
    for window in (1, 40, 300):
        batch = random_batch([1, 1, 30, 3], [700, 131, 99, 400], block_size=block_size, dtype=dtype, cache_dtype=dtype)
        pass_blocks(batch, window)
        assert_matches(batch, window)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [1]),
        ([1, 1, 1, 1], [700, 3, 64, 65]),  # threads share the long one
        ([1, 1, 5, 2, 9], [6, 300, 5, 257, 10]),
        ([129, 1, 40], [129, 7, 333]),
    ],
    ids=str,
)
def test_matches_the_reference(
    query_lens: list[int], seq_lens: list[int], window: int | None, isa: library.Isa, threads: int
) -> None:
    assert_matches(random_batch(query_lens, seq_lens), window)
    assert_matches(random_batch(query_lens, seq_lens, dtype=BF16, cache_dtype=BF16), window)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 2), (8, 1), (64, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [6, 64, 80, 96, 128, 256])
def test_any_heads(heads: tuple[int, int], head_dim: int, isa: library.Isa) -> None:
    for dtype in (FLOAT, BF16):
        assert_matches(random_batch([1, 1, 9], [37, 70, 41], heads, head_dim, dtype=dtype, cache_dtype=dtype))


@pytest.mark.parametrize("block_size", [2, 6, 8, 16, 32, 48, 1024])
def test_any_even_block_size(block_size: int, isa: library.Isa) -> None:
    for dtype in (FLOAT, BF16):
        for window in (None, 50):
            assert_matches(
                random_batch([1, 30], [131, 99], block_size=block_size, dtype=dtype, cache_dtype=dtype), window
            )


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(FLOAT, BF16), (BF16, FLOAT)], ids=str)
def test_queries_and_cache_may_differ_in_dtype(dtype: torch.dtype, cache_dtype: torch.dtype, isa: library.Isa) -> None:
    assert_matches(random_batch([1, 7], [90, 20], dtype=dtype, cache_dtype=cache_dtype))


def test_every_length_of_a_context(isa: library.Isa) -> None:
    context = make_context(150, (3, 1), 64)
    for dtype in (FLOAT, BF16):
        rows = [(context, 1, length) for length in range(1, 151, 1 if dtype == BF16 else 7)]
        assert_matches(make_batch(rows, dtype=dtype, cache_dtype=dtype))


def test_queries_may_be_a_slice_of_a_wider_row() -> None:
    batch = random_batch([1, 4], [30, 20])
    fused = torch.randn(5, 6 + 2 + 2, 64)
    fused[:, :6] = batch.q
    expected = batch.native()
    batch.q = fused[:, :6]
    assert torch.equal(batch.native(), expected)


def test_rows_without_queries_and_empty_batches_are_nothing() -> None:
    batch = random_batch([1, 3], [30, 20])
    expected = batch.native()
    meta = batch.meta
    starts = torch.tensor([0, 1, 1, 4], dtype=torch.int32)
    lengths, tables = meta.seq_lens[[0, 0, 1]], meta.block_tables[[0, 0, 1]]
    batch.meta = AttentionMetadata(1, starts, lengths, tables, meta.slot_mapping, 3, 30)
    assert torch.equal(batch.native(), expected)
    empty = torch.zeros(0, dtype=torch.int32)
    batch.meta = AttentionMetadata(0, starts[:1], empty, empty.view(0, 1), meta.slot_mapping[:0], 0, 0)
    batch.q = batch.q[:0]
    assert batch.native().shape == (0, 6, 64)


@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
def test_a_result_depends_on_its_context_alone(dtype: torch.dtype, isa: library.Isa) -> None:
    """Bit by bit the same, alone or in a batch, one token at a time or in chunks, on any number of threads."""
    length, window = 600, 300
    odd_size = 48 if isa == library.Isa.AMX and dtype == BF16 else 6  # tiles want whole blocks: others go another way
    context, *others = (make_context(n, (6, 2), 64) for n in (length, 1, 90, 300))
    before = library.num_threads()
    try:
        for sliding_window in (None, window):
            kinds = {"dtype": dtype, "cache_dtype": dtype}
            whole = make_batch([(context, length, length)], block_size=16, **kinds).native(sliding_window)
            for threads, chunk in ((1, 1), (2, 1), (5, 7), (3, 250)):
                library.set_num_threads(threads)
                for end in (257, length):
                    rows = [(context, chunk, end), *((other, 1, len(other.k)) for other in others)]
                    alone = make_batch(rows[:1], block_size=32, **kinds).native(sliding_window)
                    batched = make_batch(rows, block_size=odd_size, **kinds).native(sliding_window)
                    assert torch.equal(alone, whole[end - chunk : end]), (threads, chunk, end)
                    assert torch.equal(batched[:chunk], alone), (threads, chunk, end)
    finally:
        library.set_num_threads(before)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "head_dim"), [((3, 3), 32), ((7, 1), 96), ((40, 2), 64)], ids=str)
def test_a_token_is_the_same_alone_as_in_its_prompt(
    heads: tuple[int, int], head_dim: int, window: int | None, isa: library.Isa
) -> None:
    """At all borders of what kernels work on together: vectors, tiles, partitions, and rows of them."""
    context = make_context(530, heads, head_dim)
    kinds = {"dtype": BF16, "cache_dtype": BF16}
    whole = make_batch([(context, 530, 530)], block_size=16, **kinds).native(window)
    ends = sorted({1, 2, 15, 16, 17, 31, 32, 33, 48, 255, 256, 257, 272, 288, 511, 512, 513, 530, *range(3, 530, 23)})
    alone = make_batch([(context, 1, end) for end in ends], block_size=16, **kinds).native(window)
    assert torch.equal(alone, whole[[end - 1 for end in ends]])


def test_nan_of_a_sequence_stays_visible_in_it(isa: library.Isa) -> None:
    batch = random_batch([1, 1], [20, 30])
    batch.q[0] = torch.nan
    out = batch.native()
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None)])
def test_varlen_attention_matches_the_reference(
    causal: bool, window: int | None, isa: library.Isa, threads: int
) -> None:
    lengths = [1, 70, 130]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    q, (k, v) = torch.randn(201, 4, 64), torch.randn(2, 201, 2, 64)
    expected = reference.varlen_attention(q, k, v, starts, 130, 0.3, causal, window)
    out = native.varlen_attention(q, k, v, starts, 130, 0.3, causal, window)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        ((5, 2, 64, 16, FLOAT), "num_heads"),
        ((65, 1, 64, 16, FLOAT), "num_heads"),
        ((4, 2, 63, 16, FLOAT), "head_dim"),
        ((4, 2, 514, 16, FLOAT), "head_dim"),
        ((4, 2, 64, 15, FLOAT), "block_size"),
        ((4, 2, 64, 16, torch.float16), "float16"),
    ],
)
def test_what_cannot_run_is_named(shapes: tuple[int, int, int, int, torch.dtype], named: str) -> None:
    assert named in str(native.why_not(*shapes))
    assert native.why_not(4, 2, 64, 16, BF16) is None
