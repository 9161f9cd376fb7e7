"""Random numbers that are addressed by (seed, position) and need no state.

Owns: the function f(seed, position); changing it changes every seeded result. Never does: use a generator.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["uniforms"]


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64: torch multiplies int64 modulo 2^64, which is all the hash needs."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_FACTOR_1 = _signed(0xBF58476D1CE4E5B9)
_FACTOR_2 = _signed(0x94D049BB133111EB)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One float64 in [0, 1) for each (seed, position). seeds, positions: int64 [S].

    SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") in the variant of
    Vigna's public-domain splitmix64.c: the seed is hashed to a stream's start, so that neighbouring seeds share
    nothing, and `position` steps along that stream. The upper 53 bits become the fraction.
    """
    start = _mix(seeds + _GAMMA)
    bits = _mix(start + (positions + 1) * _GAMMA)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _FACTOR_1
    z = (z ^ _shift_right(z, 27)) * _FACTOR_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, count: int) -> Tensor:
    """Logical shift; int64's own copies the sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)
