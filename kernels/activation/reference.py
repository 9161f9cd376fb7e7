"""Gated activations in plain torch.

Owns: the arithmetic other backends are tested against. Never does: change its arguments in place.
"""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor

__all__ = ["silu_and_mul"]


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's gate, `silu(gate) * up` (Shazeer 2020, arXiv:2002.05202). x: [..., 2I] = gate | up; result [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
