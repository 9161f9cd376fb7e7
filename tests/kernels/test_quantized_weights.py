"""Weights of few bits in tensors: what they stand for, and that a CPU's packed ones are the same numbers."""

from __future__ import annotations

import pytest
import torch

from procengine.errors import ConfigError
from procengine.kernels.linear.packed import PackedFormat, PackedMatrix
from procengine.kernels.linear.quantized import WeightKind, quantize
from procengine.kernels.linear.reference import quantized_linear
from procengine.kernels.native import library

STEPS: dict[WeightKind, float] = {"int8": 1 / 127, "int4": 2 / 15, "fp8": 2**-3}  # of a group's largest weight


def weights(outputs: int = 70, inputs: int = 96) -> torch.Tensor:
    """With groups that are zero, one-sided, and tiny."""
    drawn = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(4))
    drawn[0], drawn[1], drawn[2] = 0, drawn[1].abs() + 1, drawn[2] * 1e-3
    return drawn


@pytest.mark.parametrize("kind", STEPS)
def test_a_weight_moves_by_at_most_half_a_step(kind: WeightKind) -> None:
    exact = weights()
    matrix = quantize(exact, kind)
    assert matrix.shape == tuple(exact.shape)
    peaks = exact.view(70, -1, 32).abs().amax(2, keepdim=True).expand(-1, -1, 32).reshape(70, 96)
    # fp16 scales and mins add a little; fp8's spacing is relative to a weight, not to its group.
    allowed = 0.51 * STEPS[kind] * peaks + 2e-3 * peaks + 1e-7
    assert bool(((matrix.dequantize(torch.float32) - exact).abs() <= allowed).all())


@pytest.mark.skipif(library.why_not("cpu") is not None, reason="the native kernels are not built")
@pytest.mark.parametrize(
    ("kind", "packed"), [("int8", PackedFormat("int8")), ("int4", PackedFormat("int4", mins=True))]
)
def test_the_same_numbers_as_packed_for_a_cpu(kind: WeightKind, packed: PackedFormat) -> None:
    exact = weights()
    matrix = PackedMatrix(packed, *exact.shape)
    matrix.pack(exact.numpy())
    assert torch.equal(quantize(exact, kind).dequantize(torch.float32), torch.from_numpy(matrix.unpack()))


@pytest.mark.parametrize("kind", STEPS)
def test_product_is_that_of_the_rounded_weights(kind: WeightKind) -> None:
    x, bias, matrix = torch.randn(3, 96), torch.randn(70), quantize(weights(), kind)
    expected = (x.double() @ matrix.dequantize(torch.float64).T + bias.double()).float()
    torch.testing.assert_close(quantized_linear(x, matrix, bias), expected, rtol=1e-5, atol=1e-5)


def test_inputs_that_make_no_whole_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"multiple of 32\], not \[4, 40\]"):
        quantize(torch.zeros(4, 40), "int8")
