"""What the two attention kernels share: scores of a tile, and the running softmax.

Owns: that arithmetic. Never does: load or store.

The running softmax is that of Milakov & Gimelshein 2018 (arXiv:1805.02867) as FlashAttention uses it (Dao et al. 2022,
arXiv:2205.14135): a maximum and a sum a query, by which what was added up so far is rescaled.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["accumulate", "scores"]


@triton.jit
def scores(
    queries: tl.tensor, keys: tl.tensor, scale: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr
) -> tl.tensor:
    """float32 [M, N]. queries: [M, D]; keys: [D, N]; scale: of all, or of each key, [1, N].

    float32 is not cut to tf32, but multiplied in three parts: exact enough to be compared with, and on tensor cores,
    where the plain product would not fit in registers.
    """
    result = tl.dot(queries, keys, input_precision="tf32x3") * scale
    if HAS_SOFTCAP:
        result = softcap * (2.0 / (1.0 + tl.exp(-2.0 * result / softcap)) - 1.0)  # softcap * tanh(result / softcap)
    return result


@triton.jit
def accumulate(
    acc: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    score: tl.tensor,
    is_seen: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    HAS_SCALES: tl.constexpr,
) -> tl.tensor:
    """Take a tile in. acc: float32 [M, D]; highest, total: float32 [M]; score: [M, N]; is_seen: bool [M, N];
    values: [N, D], each to be multiplied by its scale, float32 [N], if they have any. Returns the new acc, highest and
    total. A query that sees nothing of the tile keeps all three.
    """
    score = tl.where(is_seen, score, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(score, axis=1))
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # -inf minus -inf is not a number
    weights = tl.exp(score - reference[:, None])
    kept = tl.exp(highest - reference)
    shares = weights
    if HAS_SCALES:
        if values.dtype == tl.float16:  # in which a small scale of a small weight would be lost
            values = (values.to(tl.float32) * scales[:, None]).to(tl.float16)
        else:
            shares = weights * scales[None, :]
    acc = acc * kept[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="tf32x3")
    return acc, new_highest, total * kept + tl.sum(weights, axis=1)
