"""Gated activations in plain torch.

Owns: the arithmetic other backends are tested against. Never does: change its arguments in place.
"""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor

__all__ = ["gelu_tanh_and_mul", "silu_and_mul"]


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's gate, `silu(gate) * up` (Shazeer 2020, arXiv:2002.05202). x: [..., 2I] = gate | up; result [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """GEGLU's gate, `gelu(gate) * up`, with the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up
