"""Adapters of many tokens at once, against one product a token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from procengine.kernels.lora import AdapterBlocks, adapter_blocks
from procengine.kernels.lora.reference import add_lora


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=120))
def test_each_token_with_an_adapter_has_one_place_in_a_block_of_it(adapters: list[int]) -> None:
    blocks = adapter_blocks(np.array(adapters, np.int32))
    having = [token for token, adapter in enumerate(adapters) if adapter >= 0]
    if blocks is None:
        assert not having
        return
    assert sorted(blocks.tokens.tolist()) == having
    assert len(set(blocks.places.tolist())) == len(having)
    assert [blocks.adapters[place // blocks.width] for place in blocks.places] == [adapters[t] for t in blocks.tokens]
    most = max(adapters.count(adapter) for adapter in set(adapters) - {-1})
    assert blocks.width <= 16 and blocks.width < 2 * most
    assert len(blocks.adapters) == sum(-(-adapters.count(one) // blocks.width) for one in set(adapters) - {-1})


@pytest.mark.parametrize(
    "adapters", [[0], [-1, 2, -1], [3, 1, 3, 3, -1, 0, 1], [1] * 40 + [-1] + [2] * 17, list(range(4)) * 3]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_each_token_alone(adapters: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(len(adapters), 24).to(dtype), torch.randn(len(adapters), 40).to(dtype)
    a, b = torch.randn(4, 6, 24).to(dtype), torch.randn(4, 40, 6).to(dtype)
    blocks = adapter_blocks(np.array(adapters, np.int32))
    assert blocks is not None
    found = y.clone()
    add_lora(found, x, a, b, _tensors(blocks))
    for token, adapter in enumerate(adapters):
        if adapter < 0:
            assert torch.equal(found[token], y[token])
        else:
            expected = y[token].float() + b[adapter].float() @ (a[adapter].float() @ x[token].float())
            tolerance = 1e-4 if dtype == torch.float32 else 0.3  # sums of 24 products of numbers of size 1, twice
            torch.testing.assert_close(found[token].float(), expected, rtol=0.05, atol=tolerance)


def test_nobody_has_an_adapter() -> None:
    assert adapter_blocks(np.full(3, -1, np.int32)) is None


def _tensors(blocks: AdapterBlocks[np.ndarray]) -> AdapterBlocks[torch.Tensor]:
    tokens, places, adapters = map(torch.from_numpy, (blocks.tokens, blocks.places, blocks.adapters))
    return AdapterBlocks(tokens, places, adapters, blocks.width)
