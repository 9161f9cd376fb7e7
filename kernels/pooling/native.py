"""Pooling in numpy, for hidden states on the host; free of torch.

Owns: the reference's arithmetic over float32 arrays. Never does: choose how a model pools.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["pool_last", "pool_mean"]

Array = NDArray[Any]
_SMALLEST = 1e-12  # as torch's `normalize`: a vector of zeros stays one


def pool_last(hidden: Array, bounds: Array) -> NDArray[np.float32]:
    """As the reference."""
    return _normalized(hidden[bounds[1:] - 1])


def pool_mean(hidden: Array, bounds: Array) -> NDArray[np.float32]:
    """As the reference."""
    lengths = np.diff(bounds).astype(np.float32)
    return _normalized(np.add.reduceat(hidden, bounds[:-1], axis=0) / lengths[:, None])


def _normalized(vectors: Array) -> NDArray[np.float32]:
    lengths = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    unit: NDArray[np.float32] = vectors / np.maximum(lengths, np.float32(_SMALLEST))
    return unit
