"""The small operations: gated activation, projection, cache write."""

from __future__ import annotations

import pytest
import torch

from procengine.kernels.activation import silu_and_mul
from procengine.kernels.kv_cache import write_kv
from procengine.kernels.linear.reference import linear


@pytest.mark.parametrize(("tokens", "inner"), [(1, 1), (3, 7), (0, 5), (17, 64)])
def test_silu_and_mul_matches_the_formula(tokens: int, inner: int) -> None:
    x = torch.randn(tokens, 2 * inner)
    gate, up = x[:, :inner].double(), x[:, inner:].double()
    torch.testing.assert_close(silu_and_mul(x), (gate / (1 + (-gate).exp()) * up).float())


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_x_times_weight_transposed_plus_bias(with_bias: bool) -> None:
    x, weight = torch.randn(3, 5), torch.randn(7, 5)
    bias = torch.randn(7) if with_bias else None
    expected = torch.einsum("tk,nk->tn", x, weight) + (0 if bias is None else bias)
    torch.testing.assert_close(linear(x, weight, bias), expected)


def test_write_kv_fills_the_named_slots_and_no_others() -> None:
    block_size, slots = 4, torch.tensor([9, 2, 11])
    k, v = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    k_cache, v_cache = torch.zeros(3, block_size, 2, 5), torch.zeros(3, block_size, 2, 5)
    write_kv(k, v, k_cache, v_cache, slots)
    for cache, values in ((k_cache, k), (v_cache, v)):
        for token, slot in enumerate(slots.tolist()):
            assert torch.equal(cache[slot // block_size, slot % block_size], values[token])
        assert int((cache != 0).any(-1).any(-1).sum()) == 3


def test_write_kv_takes_strided_input() -> None:
    fused = torch.randn(4, 6, 5)  # q | k | v of one projection
    _, k, v = fused.split(2, dim=1)
    k_cache, v_cache = torch.zeros(2, 4, 2, 5), torch.zeros(2, 4, 2, 5)
    write_kv(k, v, k_cache, v_cache, torch.tensor([4, 5, 6, 7]))
    assert torch.equal(k_cache[1], k)
    assert torch.equal(v_cache[1], v)
