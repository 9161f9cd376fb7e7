"""What the loader asks of a checkpoint, whatever its file format.

Owns: the protocol. Never does: read anything itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["RowPiece", "WeightSource"]


class RowPiece(NamedTuple):
    """Some rows of a matrix: floats [n, K], or, with a `ggml_type`, the blocks as they are stored: uint8 [n, bytes]."""

    rows: Tensor  # int64 [n], where they stand in the matrix
    values: Tensor
    ggml_type: str | None


class WeightSource(Protocol):
    """Tensors by their Hugging Face names. The reading methods may be called from several threads at once."""

    @property
    def names(self) -> Collection[str]:
        """All tensors that can be read."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, outermost dimension first, without reading it. `name` is one of `names`."""
        ...

    def ggml_type(self, name: str) -> str | None:
        """The block format that the tensor is stored in ("Q4_0", ...), or None where it is plain floats."""
        ...

    def read_into(self, name: str, destination: Tensor) -> None:
        """Fill `destination` (of the tensor's shape; any floating dtype, any device) with the tensor's values.

        Raises ModelError, naming the tensor, when its stored type cannot be decoded.
        """
        ...

    def pieces(self, name: str, *, keep_blocks: bool) -> Iterator[RowPiece]:
        """All rows of the matrix `name`, a few at a time; as blocks, with `keep_blocks`, where it is stored so.

        Raises ModelError, naming the tensor, when its stored type cannot be decoded.
        """
        ...

    def release(self, name: str) -> None:
        """The tensor will not be read again: what it takes of memory can go, where the format allows it."""
        ...
