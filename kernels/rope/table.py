"""Cosine and sine tables of rotary position embedding, with the usual ways to stretch them.

Owns: frequencies and tables. Never does: apply them, or decide which scaling a model has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from procengine.errors import ConfigError

__all__ = ["RopeSpec", "RotaryTable", "make_rotary_table"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """What the frequencies depend on; the names are those of a Hugging Face config."""

    head_dim: int
    theta: float = 10000.0
    kind: str = "none"  # none | linear | llama3 | yarn
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin: float32 [max_len, head_dim/2]; row p holds the angles of position p."""

    cos: Tensor
    sin: Tensor


def make_rotary_table(spec: RopeSpec, max_len: int, device: str | torch.device = "cpu") -> RotaryTable:
    """The table for positions 0..max_len-1."""
    # float32 throughout, as the models were trained with, rounding errors included.
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), _frequencies(spec))
    multiplier = _attention_factor(spec)
    return RotaryTable(cos=(angles.cos() * multiplier).to(device), sin=(angles.sin() * multiplier).to(device))


def _frequencies(spec: RopeSpec) -> Tensor:
    """float32 [head_dim/2], radians per position."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).to(torch.float32) / spec.head_dim
    plain = 1.0 / (spec.theta**exponents)
    match spec.kind:
        case "none":
            return plain
        case "linear":
            return plain / spec.factor
        case "llama3":
            return _llama3(spec, plain)
        case "yarn":
            return _yarn(spec, plain)
        case _:
            raise ConfigError(f"unknown rope scaling {spec.kind!r}; there are: none, linear, llama3, yarn")


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Slow waves are stretched by factor, fast ones kept, those between blended (Llama 3.1's reference code)."""
    turns = spec.original_max_position_embeddings * plain / (2 * math.pi)  # full turns within the trained context
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1.0 - keep) * plain / spec.factor + keep * plain


def _yarn(spec: RopeSpec, plain: Tensor) -> Tensor:
    """NTK-by-parts interpolation (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""
    low, high = (_yarn_dimension(spec, turns) for turns in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    width = max(high - low, 0.001)  # never divide by zero
    ramp = ((torch.arange(spec.head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / spec.factor * ramp + plain * (1.0 - ramp)


def _yarn_dimension(spec: RopeSpec, turns: float) -> float:
    """The (fractional) pair whose wave makes `turns` full turns within the original context."""
    wavelengths = spec.original_max_position_embeddings / (turns * 2 * math.pi)
    return spec.head_dim * math.log(wavelengths) / (2 * math.log(spec.theta))


def _attention_factor(spec: RopeSpec) -> float:
    """YaRN's sharpening of the attention logits, put on cos and sin (eq. 22 of the paper); 1 for the other kinds."""
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    return 0.1 * math.log(spec.factor) + 1.0 if spec.factor > 1.0 else 1.0
