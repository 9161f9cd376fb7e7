"""Pooling in numpy, for hidden states on the host; free of torch.

Owns: the reference's arithmetic over float32 arrays. Never does: choose how a model pools.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["normalized", "pool", "pool_last", "pool_mean", "shorten"]

Array = NDArray[Any]
_SMALLEST = 1e-12  # as torch's `normalize`: a vector of zeros stays one


def pool_last(hidden: Array, bounds: Array) -> NDArray[np.float32]:
    """As the reference."""
    return normalized(hidden[bounds[1:] - 1])


def pool_mean(hidden: Array, bounds: Array) -> NDArray[np.float32]:
    """As the reference."""
    return normalized(_mean(hidden, bounds))


def pool(hidden: Array, bounds: Array, how: str, *, normalize: bool) -> NDArray[np.float32]:
    """float32 [R, H] of hidden states [T, H]: how is "last", "mean" or "cls" (the first); of length 1 if asked.

    bounds: int [R + 1], where each sequence begins, and T. None is empty.
    """
    match how:
        case "last":
            vectors: Array = hidden[bounds[1:] - 1]
        case "cls":
            vectors = hidden[bounds[:-1]]
        case _:
            vectors = _mean(hidden, bounds)
    return normalized(vectors) if normalize else vectors


def shorten(vectors: Array, dimensions: int, *, normalize: bool) -> NDArray[np.float32]:
    """The first `dimensions` numbers of each (0: all), with length 1 if asked."""
    if not dimensions or dimensions == vectors.shape[1]:
        return vectors
    short = vectors[:, :dimensions]
    return normalized(short) if normalize else np.ascontiguousarray(short)


def normalized(vectors: Array) -> NDArray[np.float32]:
    """Vectors [N, H] with length 1; one of zeros stays one."""
    lengths = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    unit: Array = vectors / np.maximum(lengths, np.float32(_SMALLEST))
    return unit


def _mean(hidden: Array, bounds: Array) -> NDArray[np.float32]:
    lengths = np.diff(bounds).astype(np.float32)
    means: Array = np.add.reduceat(hidden, bounds[:-1], axis=0) / lengths[:, None]
    return means
