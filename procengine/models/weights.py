"""What the loader asks of a checkpoint, whatever its file format.

Owns: the protocol. Never does: read anything itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

__all__ = ["WeightSource"]


class WeightSource(Protocol):
    """Tensors by their Hugging Face names. `read_into` may be called from several threads at once."""

    @property
    def names(self) -> Collection[str]:
        """All tensors that can be read."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, outermost dimension first, without reading it. `name` is one of `names`."""
        ...

    def read_into(self, name: str, destination: Tensor) -> None:
        """Fill `destination` (of the tensor's shape; any floating dtype, any device) with the tensor's values.

        Raises ModelError, naming the tensor, when its stored type cannot be decoded.
        """
        ...
