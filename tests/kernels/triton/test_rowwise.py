"""Norm, activation, rotary positions and cache writes in Triton against their references, over odd shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from procengine.kernels.activation import reference as activation_reference
from procengine.kernels.activation import triton as activation
from procengine.kernels.kv_cache import reference as kv_cache_reference
from procengine.kernels.kv_cache import triton as kv_cache
from procengine.kernels.norm import reference as norm_reference
from procengine.kernels.norm import triton as norm
from procengine.kernels.rope import RopeSpec, make_rotary_table
from procengine.kernels.rope import reference as rope_reference
from procengine.kernels.rope import triton as rope

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def assert_rounds_alike(a: Tensor, b: Tensor) -> None:
    """Equal but for the last bit of their dtype, on which compilers differ."""
    assert a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=4 * torch.finfo(a.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 576])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    assert_rounds_alike(norm.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))
    out, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    expected_out, expected_total = norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_rounds_alike(total, expected_total)
    torch.testing.assert_close(out, expected_out, rtol=8 * torch.finfo(dtype).eps, atol=1e-6)


def test_rms_norm_of_the_heads_of_a_slice() -> None:
    fused, weight = torch.randn(6, 9, 16), torch.randn(16)
    heads = fused[:, 2:5]
    assert_rounds_alike(norm.rms_norm(heads, weight, 1e-6), norm_reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 1025])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations(name: str, size: int, dtype: torch.dtype) -> None:
    x = (4 * torch.randn(3, 2 * size)).to(dtype)
    expected = getattr(activation_reference, name)(x)
    found = getattr(activation, name)(x)
    # torch's tail of the tanh form is 1 + tanh, which cancels
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 2)])
@pytest.mark.parametrize("head_dim", [2, 48, 64])
def test_rope_and_the_write_behind_it(head_dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    fused = torch.randn(7, heads[0] + 2 * heads[1], head_dim).to(dtype)
    q, k, v = fused.split((heads[0], heads[1], heads[1]), dim=1)
    table = make_rotary_table(RopeSpec(head_dim), 100)
    cos, sin = torch.from_numpy(table.cos), torch.from_numpy(table.sin)
    positions = torch.randint(0, 100, (7,), dtype=torch.int32)
    expected_q, expected_k = rope_reference.apply_rope(q, k, cos, sin, positions)
    rotated_q, rotated_k = rope.apply_rope(q, k, cos, sin, positions)
    eps = torch.finfo(dtype).eps  # of a difference of products
    torch.testing.assert_close(rotated_q, expected_q, rtol=8 * eps, atol=4 * eps)
    torch.testing.assert_close(rotated_k, expected_k, rtol=8 * eps, atol=4 * eps)

    caches = [torch.full((4, 8, heads[1], head_dim), torch.nan, dtype=dtype) for _ in range(4)]
    slots = torch.randperm(32)[:7]
    q_again = rope.rope_and_write_kv(q, k, v, cos, sin, positions, caches[0], caches[1], slots)
    kv_cache_reference.write_kv(rotated_k, v, caches[2], caches[3], slots)
    assert torch.equal(q_again, rotated_q)
    for ours, expected in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_writes_its_slots_alone(dtype: torch.dtype) -> None:
    fused = torch.randn(5, 8, 12).to(dtype)
    k, v = fused[:, 2:5], fused[:, 5:]
    caches = [torch.full((3, 4, 3, 12), torch.nan, dtype=dtype) for _ in range(4)]
    slots = torch.tensor([11, 0, 7, 3, 4])
    kv_cache.write_kv(k, v, caches[0], caches[1], slots)
    kv_cache_reference.write_kv(k, v, caches[2], caches[3], slots)
    for ours, expected in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def test_no_tokens_change_nothing() -> None:
    nothing, weight = torch.zeros(0, 8), torch.ones(8)
    assert norm.rms_norm(nothing, weight, 1e-5).shape == (0, 8)
    assert activation.silu_and_mul(nothing).shape == (0, 4)
    k, cache = torch.zeros(0, 2, 4), torch.zeros(3, 4, 2, 4)
    kv_cache.write_kv(k, k, cache, cache, torch.zeros(0, dtype=torch.int64))
