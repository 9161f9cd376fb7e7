"""Tensors as the numpy arrays that wrappers free of torch take, in the same memory, and back."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from procengine.kernels.linear.packed import PackedMatrix
from procengine.kernels.sampling import SamplingColumns

__all__ = ["as_array", "as_arrays", "pack", "unpack"]


def as_array(tensor: Tensor) -> NDArray[Any]:
    """bfloat16 as its bits."""
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    array: NDArray[Any] = bits.numpy()
    return array


def as_arrays(columns: SamplingColumns[Tensor]) -> SamplingColumns[NDArray[Any]]:
    """All columns."""
    names = SamplingColumns.__dataclass_fields__
    return SamplingColumns(**{name: as_array(getattr(columns, name)) for name in names})


def pack(matrix: PackedMatrix, rows: Tensor, outputs: Tensor | None = None) -> None:
    """`matrix.pack` of tensors."""
    matrix.pack(as_array(rows), None if outputs is None else as_array(outputs))


def unpack(matrix: PackedMatrix, outputs: Tensor | None = None) -> Tensor:
    """`matrix.unpack` as a tensor."""
    return torch.from_numpy(matrix.unpack(None if outputs is None else as_array(outputs)))
