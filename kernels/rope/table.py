"""Cosine and sine tables of rotary position embedding, with the usual ways to stretch them.

Owns: frequencies and tables. Never does: apply them, or decide which scaling a model has. Free of torch.

Values are float32 from step to step, as the models were trained with, rounding errors included; a power, a cosine and
a sine are computed in float64 and rounded once, which is what the libraries of other engines come within one bit of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from procengine.errors import ConfigError

__all__ = ["RopeSpec", "RotaryTable", "make_rotary_table"]

Float32s = NDArray[np.float32]
_CHUNK = 4096  # positions


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """What the frequencies depend on; the names are those of a Hugging Face config."""

    head_dim: int  # those of its dimensions that turn
    theta: float = 10000.0
    kind: str = "none"  # none | linear | llama3 | yarn | longrope
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin: float32 [max_len, head_dim/2]; row p holds the angles of position p."""

    cos: Float32s
    sin: Float32s


def make_rotary_table(spec: RopeSpec, max_len: int, head_dim: int | None = None) -> RotaryTable:
    """The table for positions 0..max_len-1; for heads of `head_dim`, whose further pairs then stay as they are."""
    frequencies, multiplier = _frequencies(spec), np.float32(_attention_factor(spec))
    shape, turning = (max_len, (head_dim or spec.head_dim) // 2), slice(frequencies.size)
    table = RotaryTable(np.ones(shape, np.float32), np.zeros(shape, np.float32))
    for start in range(0, max_len, _CHUNK):  # the float64 intermediates stay small
        part = slice(start, min(start + _CHUNK, max_len))
        angles = np.outer(np.arange(part.start, part.stop, dtype=np.float32), frequencies).astype(np.float64)
        table.cos[part, turning] = np.cos(angles).astype(np.float32) * multiplier
        table.sin[part, turning] = np.sin(angles).astype(np.float32) * multiplier
    return table


def _frequencies(spec: RopeSpec) -> Float32s:
    """float32 [head_dim/2], radians per position."""
    exponents = np.arange(0, spec.head_dim, 2).astype(np.float32) / np.float32(spec.head_dim)
    powers = np.power(spec.theta, exponents.astype(np.float64)).astype(np.float32)
    plain: Float32s = np.float32(1) / powers
    match spec.kind:
        case "none":
            return plain
        case "linear":
            return plain / np.float32(spec.factor)
        case "llama3":
            return _llama3(spec, plain)
        case "yarn":
            return _yarn(spec, plain)
        case "longrope":  # Ding et al. 2024, arXiv:2402.13753
            return np.float32(1) / (np.array(spec.factors, np.float32) * powers)
        case _:
            raise ConfigError(f"unknown rope scaling {spec.kind!r}; there are: none, linear, llama3, yarn, longrope")


def _llama3(spec: RopeSpec, plain: Float32s) -> Float32s:
    """Slow waves are stretched by factor, fast ones kept, those between blended (Llama 3.1's reference code)."""
    turns = plain * spec.original_max_position_embeddings / (2 * math.pi)  # full turns within the trained context
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clip(0.0, 1.0)
    blended: Float32s = (1.0 - keep) * plain / spec.factor + keep * plain
    return blended


def _yarn(spec: RopeSpec, plain: Float32s) -> Float32s:
    """NTK-by-parts interpolation (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""
    low, high = (_yarn_dimension(spec, turns) for turns in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    width = max(high - low, 0.001)  # never divide by zero
    ramp = ((np.arange(spec.head_dim // 2, dtype=np.float32) - low) / width).clip(0.0, 1.0)
    blended: Float32s = plain / spec.factor * ramp + plain * (1.0 - ramp)
    return blended


def _yarn_dimension(spec: RopeSpec, turns: float) -> float:
    """The (fractional) pair whose wave makes `turns` full turns within the original context."""
    wavelengths = spec.original_max_position_embeddings / (turns * 2 * math.pi)
    return spec.head_dim * math.log(wavelengths) / (2 * math.log(spec.theta))


def _attention_factor(spec: RopeSpec) -> float:
    """What sharpens the attention logits, put on cos and sin (eq. 22 of YaRN's paper); 1 for most kinds."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    return 0.1 * math.log(spec.factor) + 1.0 if spec.factor > 1.0 else 1.0
