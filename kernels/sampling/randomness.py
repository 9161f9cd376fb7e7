"""Random numbers that are addressed by (seed, position, token) and need no state.

Owns: the function; changing it changes every seeded result. Never does: use a generator.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_gumbel_noise", "row_keys"]


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64: torch multiplies int64 modulo 2^64, which is all the hash needs."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_FACTOR_1 = _signed(0xBF58476D1CE4E5B9)
_FACTOR_2 = _signed(0x94D049BB133111EB)
# Of lowbias32, a 32-bit mixer with two multiplications: C. Wellons, "Prospecting for Hash Functions" (public domain).
_FACTOR_32_1 = 0x7FEB352D
_FACTOR_32_2 = 0x846CA68B - (1 << 32)
_GAMMA_32 = 0x9E3779B9 - (1 << 32)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """One int64 of random bits for each (seed, position). seeds, positions: int64 [S].

    SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") in the variant of
    Vigna's public-domain splitmix64.c: the seed is hashed to a stream's start, so that neighbouring seeds share
    nothing, and `position` steps along that stream.
    """
    return _mix(_mix(seeds + _GAMMA) + (positions + 1) * _GAMMA)


def add_gumbel_noise(scores: Tensor, keys: Tensor) -> Tensor:
    """scores, float32 [S, V], plus noise g(key, token) with the standard Gumbel distribution. keys: int64 [S].

    g = -log(-log(1 - w)), where w in (0, 1) is 31 bits of a hash of the row's key and the token's id. The small values
    of w, which make the large noise, keep their full precision as float32.
    """
    tokens = torch.arange(scores.shape[1], device=scores.device, dtype=torch.int32)
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    z = _mix32(low[:, None] ^ (tokens * _GAMMA_32))
    z = _mix32(z ^ high[:, None])
    w = z.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    exponential = w.neg_().log1p_().neg_()
    return exponential.log_().neg_().add_(scores)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _FACTOR_1
    z = (z ^ _shift_right(z, 27)) * _FACTOR_2
    return z ^ _shift_right(z, 31)


def _mix32(z: Tensor) -> Tensor:
    """int32, changed in place: multiplied modulo 2^32; its shifts copy the sign, so the copies are masked."""
    z ^= (z >> 16).bitwise_and_(0xFFFF)
    z *= _FACTOR_32_1
    z ^= (z >> 15).bitwise_and_(0x1FFFF)
    z *= _FACTOR_32_2
    z ^= (z >> 16).bitwise_and_(0xFFFF)
    return z


def _shift_right(z: Tensor, count: int) -> Tensor:
    """Logical shift; int64's own copies the sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)
