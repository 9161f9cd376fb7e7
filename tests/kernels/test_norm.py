"""RMS normalisation against its formula in float64."""

from __future__ import annotations

import pytest
import torch

from procengine.kernels.norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 33), (0, 16)])
def test_rms_norm_matches_the_formula(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected.float(), atol=1e-5, rtol=1e-5)


def test_the_statistic_is_float32_in_low_precision() -> None:
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # the sum of squares overflows float16
    out = rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-6)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, torch.ones_like(x))


def test_add_rms_norm_returns_the_sum_and_its_norm_and_changes_nothing() -> None:
    x, residual, weight = torch.randn(5, 9), torch.randn(5, 9), torch.randn(9)
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
