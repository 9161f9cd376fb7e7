"""Dense projections in plain torch.

Owns: the arithmetic other backends are tested against. Never does: change its arguments in place.
"""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`. x: [..., K], weight: [N, K], bias: [N] or None; result [..., N] in x's dtype."""
    return functional.linear(x, weight, bias)
