"""`NewTensors`: where the tensors of a model come into being.

Owns: their dtype and device. Never does: fill them; on the device "meta" they take no memory, and have their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NewTensors"]


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
