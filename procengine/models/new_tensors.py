"""`NewTensors`: where the tensors of a model come into being, and what those of few bits are rounded from.

Owns: their dtype and device. Never does: fill them; on the device "meta" they take no memory, and have their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from procengine.kernels.linear.quantized import QuantizedMatrix, WeightKind, quantize

__all__ = ["Matrix", "NewTensors", "as_floats", "narrow", "rounded"]

Matrix = Tensor | QuantizedMatrix


@dataclass(frozen=True, slots=True)
class NewTensors:
    """Makes uninitialised tensors."""

    dtype: torch.dtype
    device: str | torch.device

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def if_(self, wanted: bool, *shape: int) -> Tensor | None:
        """A tensor, if the model has it."""
        return self(*shape) if wanted else None


def as_floats(matrix: Matrix) -> Tensor:
    """A matrix that is not rounded yet: checkpoints are read into floats."""
    assert isinstance(matrix, Tensor)
    return matrix


def rounded(matrix: Matrix, kind: WeightKind) -> QuantizedMatrix:
    """`matrix` in few bits. Raises ConfigError for a number of inputs that is no multiple of 32."""
    return quantize(as_floats(matrix), kind)


def narrow(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A vector, if there is one, in the dtype that a rounded model computes in."""
    return None if vector is None else vector.to(dtype)
