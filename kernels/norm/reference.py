"""RMS normalisation in plain torch.

Owns: the arithmetic other backends are tested against. Never does: change its arguments in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    x: [..., N], weight: [N], both of one floating dtype; the result is like x. The statistic is float32 and the
    quotient is rounded to x's dtype before it meets the weight: models were trained with that order.
    """
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of x and residual, normalised, and the sum itself (the next residual). All [..., N]."""
    total = residual + x
    return rms_norm(total, weight, eps), total
