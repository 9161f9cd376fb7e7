"""Whole tensors of a checkpoint in float32, checked against what the model wants: `read_float32`. Free of torch.

Owns: the check of a tensor's presence and shape, and its errors. Never does: pack or compute.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.errors import ModelError
from procengine.kernels.native.arguments import to_float32
from procengine.models.weights import WeightSource

__all__ = ["check_tensor", "read_float32"]


def check_tensor(path: str, source: WeightSource, name: str, shape: tuple[int, ...]) -> None:
    """Raise ModelError unless the checkpoint at `path` has this tensor in this shape."""
    if name not in source.names:
        raise ModelError(f"{path}: tensor {name} is missing")
    found = source.shape(name)
    if found != shape:
        raise ModelError(f"{path}: tensor {name} has shape {list(found)}, expected {list(shape)}")


def read_float32(path: str, source: WeightSource, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A new array. Raises ModelError as `check_tensor` does."""
    check_tensor(path, source, name, shape)
    tensor = np.empty(shape, np.float32)
    for rows, values, _ in source.pieces(name, keep_blocks=False):
        tensor[rows] = to_float32(values)
    return tensor
