"""Formulas of rope scaling that reading a model's facts needs, whatever format they are written in.

Owns: YaRN's attention factor, the shape of Llama 3.1's scaling, and which of LongRoPE's two is taken. Never does:
rotate anything (see `kernels/rope`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from procengine.config import ModelConfig, RopeScaling

__all__ = ["llama3_divisors", "rope_for_length", "yarn_mscale"]


def yarn_mscale(factor: float, mscale: float) -> float:
    """What YaRN multiplies cos and sin by when the context is stretched by `factor` (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> Sequence[float]:
    """By how much Llama 3.1 divides each of the head_dim/2 frequencies (the formula of its reference code)."""
    trained = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    divisors: list[float] = []
    for index in range(0, head_dim, 2):
        turns = trained * theta ** (-index / head_dim) / (2 * math.pi)  # rotations within the trained context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1.0 / ((1.0 - smooth) / scaling.factor + smooth))
    return divisors


def rope_for_length(model: ModelConfig, max_model_len: int) -> ModelConfig:
    """LongRoPE has frequencies for the trained context and others beyond it (arXiv:2402.13753). Keys in the cache
    cannot be turned again, so what sequences of `max_model_len` take serves all of a group."""
    scaling = model.rope_scaling
    if scaling.kind != "longrope":
        return model
    is_long = max_model_len > scaling.original_max_position_embeddings
    return replace(model, rope_scaling=replace(scaling, is_long=is_long))
