"""How a layer attends: what differs from model to model, and from layer to layer.

Owns: these values. Never does: compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AttentionSpec", "Rotation"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The facts of one layer that its attention needs, beside its queries, keys and values."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    is_causal: bool = True  # tokens do not see those behind them; a sliding window needs that


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary positions that queries and keys still have to be turned by (`rope`)."""

    cos: Tensor  # float32 [max_positions, D/2]
    sin: Tensor
    positions: Tensor  # int32 or int64 [T]
