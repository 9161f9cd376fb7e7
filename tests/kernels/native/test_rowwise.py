"""Native norms, activations, rotation and cache writes against the torch references, by each instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from procengine.kernels.activation import native as native_activation
from procengine.kernels.activation import reference as reference_activation
from procengine.kernels.kv_cache import native as native_cache
from procengine.kernels.native import library
from procengine.kernels.norm import native as native_norm
from procengine.kernels.norm import reference as reference_norm
from procengine.kernels.rope import RopeSpec, RotaryTable, make_rotary_table
from procengine.kernels.rope.reference import apply_rope

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the native library is not built")

DTYPES = [torch.float32, torch.bfloat16]
# A float32 statistic may differ in its last bits, which may round a bfloat16 the other way, and its product once more.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


@pytest.fixture(params=list(library.Isa), ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[library.Isa]:
    if request.param > library.best_isa():
        pytest.skip(f"this CPU has no {request.param.name}")
    with library.forced_isa(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = library.num_threads()
    library.set_num_threads(3)
    yield
    library.set_num_threads(before)


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert out.dtype == expected.dtype
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance / 8, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 7), (5, 576), (2, 3, 100), (400, 576)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, isa: library.Isa) -> None:
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    assert_close(native_norm.rms_norm(x, weight, 1e-5), reference_norm.rms_norm(x, weight, 1e-5))
    before = x.clone(), residual.clone()
    out, total = native_norm.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_close(out, expected)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rms_norm_of_a_slice_and_of_extreme_values() -> None:
    x, weight = torch.randn(9, 100), torch.randn(40)
    assert_close(native_norm.rms_norm(x[:, 3:43], weight, 1e-5), reference_norm.rms_norm(x[:, 3:43], weight, 1e-5))
    for value in (0.0, 1e-30, 1e18):
        x = torch.full((2, 40), value)
        assert_close(native_norm.rms_norm(x, weight, 1e-5), reference_norm.rms_norm(x, weight, 1e-5))
    x[0, 5] = torch.nan
    assert native_norm.rms_norm(x, weight, 1e-5).isnan().all(dim=1).tolist() == [True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 2), (1, 2), (3, 14), (2, 2, 64), (200, 3072)], ids=str)
def test_silu_and_mul(shape: tuple[int, ...], dtype: torch.dtype, isa: library.Isa) -> None:
    x = (torch.randn(shape) * 5).to(dtype)
    assert_close(native_activation.silu_and_mul(x), reference_activation.silu_and_mul(x))


def test_silu_at_its_ends(isa: library.Isa) -> None:
    gate = torch.tensor([-torch.inf, -1e20, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, 1e30, torch.inf, torch.nan])
    x = torch.cat((gate, torch.ones(12)))
    out, expected = native_activation.silu_and_mul(x), reference_activation.silu_and_mul(x)
    # silu(-inf) is NaN by torch's own arithmetic; either is of no use to anybody.
    torch.testing.assert_close(out[1:], expected[1:], rtol=1e-5, atol=1e-15, equal_nan=True)


def logical(cache: Tensor, values: bool) -> Tensor:
    """[num_blocks, block_size, Hkv, D] in that order, from the order that `native/kv_cache.h` describes."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    step = 4 // cache.element_size()
    if values:
        parts = cache.view(num_blocks, num_kv_heads, block_size // step, head_dim, step).permute(0, 2, 4, 1, 3)
    else:
        parts = cache.view(num_blocks, num_kv_heads, head_dim // step, block_size, step).permute(0, 3, 1, 2, 4)
    return parts.reshape(cache.shape)


def rotated(q: Tensor, k: Tensor, table: RotaryTable, positions: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rope(q, k, torch.from_numpy(table.cos), torch.from_numpy(table.sin), positions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((2, 1), 6), ((4, 2), 80)], ids=str)
def test_rotation_and_writes_give_the_bits_of_the_reference(
    heads: tuple[int, int], head_dim: int, cache_dtype: torch.dtype, dtype: torch.dtype, isa: library.Isa
) -> None:
    tokens, block_size, table = 37, 6, make_rotary_table(RopeSpec(head_dim), 100)
    fused = torch.randn(tokens, heads[0] + 2 * heads[1], head_dim).to(dtype)
    q, k, v = fused.split((heads[0], heads[1], heads[1]), dim=1)
    positions, slots = torch.randint(100, (tokens,)), torch.randperm(20 * block_size)[:tokens]
    expected_q, expected_k = rotated(q, k, table, positions)
    k_before = k.clone()
    caches = torch.full((2, 20, block_size, heads[1], head_dim), 7.0, dtype=cache_dtype)
    native_cache.rotate_and_write_kv(q, k, v, caches[0], caches[1], slots, table, positions)
    assert torch.equal(q, expected_q)
    assert torch.equal(k, k_before)
    for cache, written, is_values in ((caches[0], expected_k, False), (caches[1], v, True)):
        rows = logical(cache, is_values).flatten(0, 1)
        assert torch.equal(rows[slots], written.to(cache_dtype))
        untouched = torch.ones(20 * block_size, dtype=torch.bool).index_fill(0, slots, False)
        assert (rows[untouched] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_normalised_before_they_turn(dtype: torch.dtype, isa: library.Isa) -> None:
    table = make_rotary_table(RopeSpec(80), 50)
    q, k, v = (torch.randn(11, n, 80).to(dtype) for n in (4, 2, 2))
    q_norm, k_norm = torch.randn(2, 80).to(dtype)
    positions, slots = torch.arange(11), torch.arange(11) + 3
    normed_q, normed_k = reference_norm.rms_norm(q, q_norm, 1e-6), reference_norm.rms_norm(k, k_norm, 1e-6)
    expected_q, expected_k = rotated(normed_q, normed_k, table, positions)
    caches = torch.zeros(2, 1, 16, 2, 80, dtype=dtype)
    native_cache.rotate_and_write_kv(
        q, k, v, caches[0], caches[1], slots, table, positions, q_norm=q_norm, k_norm=k_norm, eps=1e-6
    )
    torch.testing.assert_close(q, expected_q, atol=4 * TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])
    written = logical(caches[0], values=False)[0, slots]
    torch.testing.assert_close(written, expected_k, atol=4 * TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])


def test_stretched_tables_are_used_as_they_are(isa: library.Isa) -> None:
    spec = RopeSpec(64, kind="yarn", factor=4.0, original_max_position_embeddings=32)
    table: RotaryTable = make_rotary_table(spec, 128)
    q, k, v = torch.randn(5, 2, 64), torch.randn(5, 1, 64), torch.randn(5, 1, 64)
    positions, slots = torch.tensor([0, 1, 64, 127, 3]), torch.arange(5)
    expected_q, _ = rotated(q, k, table, positions)
    cache = torch.zeros(2, 1, 16, 1, 64)
    native_cache.rotate_and_write_kv(q, k, v, cache[0], cache[1], slots, table, positions)
    assert torch.equal(q, expected_q)
