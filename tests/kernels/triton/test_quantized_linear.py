"""Products with weights of few bits in Triton against the reference, over odd shapes."""

from __future__ import annotations

import pytest
import torch

from procengine.kernels.linear import reference
from procengine.kernels.linear import triton as linear
from procengine.kernels.linear.quantized import WeightKind, quantize

KINDS: list[WeightKind] = ["int8", "int4", "fp8"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "outputs", "inputs"), [(1, 1, 32), (3, 50, 96), (40, 33, 256), (0, 5, 32)])
def test_product_is_the_references(kind: WeightKind, num_rows: int, outputs: int, inputs: int) -> None:
    x, bias = torch.randn(num_rows, inputs), torch.randn(outputs)
    weight = quantize(torch.randn(outputs, inputs), kind)
    expected = reference.quantized_linear(x, weight, bias)
    torch.testing.assert_close(linear.quantized_linear(x, weight, bias), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_close(kind: WeightKind) -> None:
    x, weight = torch.randn(2, 3, 128).half(), quantize(torch.randn(20, 128), kind)
    out = linear.quantized_linear(x, weight)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, reference.quantized_linear(x, weight), rtol=2e-3, atol=2e-2)


def test_rows_may_be_a_slice() -> None:
    x, weight = torch.randn(5, 2, 64), quantize(torch.randn(7, 64), "int8")
    expected = reference.quantized_linear(x[:, 1], weight)
    torch.testing.assert_close(linear.quantized_linear(x[:, 1], weight), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_meet_weights_written_out(kind: WeightKind, dtype: torch.dtype) -> None:
    weight = quantize(torch.randn(45, 64), kind)
    written = linear.dequantize(weight, dtype)
    torch.testing.assert_close(written, weight.dequantize(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    x = torch.randn(150, 64).to(dtype)
    assert torch.equal(linear.quantized_linear(x, weight), torch.nn.functional.linear(x, written))
