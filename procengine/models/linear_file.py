"""One linear layer in a file of its own, as bge-m3 has beside its encoder: `read_linear`.

Owns: its two tensors, `weight` and `bias`, from safetensors or from a file of `torch.save`. Never does: compute, load
torch, or run what a file holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from procengine.errors import ModelError
from procengine.kernels.native.arguments import BFLOAT16, to_float32
from procengine.safetensors_file import SafetensorsFile
from procengine.torch_file import TorchFile

__all__ = ["LinearFile", "read_linear"]

_READABLE: Final[dict[str, np.dtype[Any]]] = {
    "F32": np.dtype(np.float32),
    "BF16": BFLOAT16,
    "F16": np.dtype(np.float16),
}


class LinearFile(NamedTuple):
    """y = x weight^T + bias: float32 [outputs, inputs] and [outputs]."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


def read_linear(path: str, num_inputs: int, num_outputs: int | None = None) -> LinearFile:
    """The layer in this file; None: it may have any number of outputs.

    Raises:
        ModelError: it is no such file, or has not these tensors in these shapes.
    """
    file = TorchFile(path) if Path(path).suffix == ".pt" else SafetensorsFile(path)
    weight = _read(file, "weight", 2)
    if weight.shape[1] != num_inputs:
        raise ModelError(f"{path}: weight has {weight.shape[1]} inputs, the model's hidden size is {num_inputs}")
    if num_outputs is not None and weight.shape[0] != num_outputs:
        raise ModelError(f"{path}: weight has {weight.shape[0]} outputs, must be {num_outputs}")
    bias = _read(file, "bias", 1) if "bias" in file.tensors else np.zeros(weight.shape[0], np.float32)
    if bias.shape != weight.shape[:1]:
        raise ModelError(f"{path}: bias has shape {list(bias.shape)}, expected {[weight.shape[0]]}")
    return LinearFile(weight, bias)


def _read(file: TorchFile | SafetensorsFile, name: str, num_dims: int) -> NDArray[np.float32]:
    info = file.tensors.get(name)
    if info is None:
        raise ModelError(f"{file.path}: tensor {name} is missing")
    dtype = _READABLE.get(info.dtype)
    if dtype is None:
        raise ModelError(f"{file.path}: tensor {name} is stored as {info.dtype}; supported: {', '.join(_READABLE)}")
    if len(info.shape) != num_dims or 0 in info.shape:
        raise ModelError(f"{file.path}: tensor {name} has shape {list(info.shape)}, expected {num_dims} dimensions")
    return to_float32(file.bytes_at(info.offset, info.nbytes).view(dtype).reshape(info.shape)).copy()
