"""Dense projections in plain torch.

Owns: the arithmetic other backends are tested against. Never does: change its arguments in place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from procengine.kernels.linear.quantized import QuantizedMatrix

__all__ = ["linear", "quantized_linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`. x: [..., K], weight: [N, K], bias: [N] or None; result [..., N] in x's dtype."""
    return functional.linear(x, weight, bias)


def quantized_linear(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    """The same with weights of few bits: products and sums in float32, the result rounded once to x's dtype."""
    wide = functional.linear(x.float(), weight.dequantize(torch.float32))
    return (wide if bias is None else wide + bias.float()).to(x.dtype)
