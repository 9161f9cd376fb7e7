"""Weights from a Hugging Face folder: `model.safetensors`, shards listed by `model.safetensors.index.json`, or, where
there is neither, `pytorch_model.bin`, which is read without unpickling.

Owns: finding the file of each tensor. Never does: copy a file into memory; tensors come from the mapped file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.errors import ModelError
from procengine.kernels.native.arguments import BFLOAT16
from procengine.models.weights import RowPiece
from procengine.safetensors_file import SafetensorsFile
from procengine.torch_file import TorchFile

__all__ = ["SafetensorsWeights"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TORCH = "pytorch_model.bin"
_CHUNK_BYTES = 1 << 20
_READABLE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": BFLOAT16,
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}


class SafetensorsWeights:
    """A WeightSource over the files of one folder."""

    def __init__(self, folder: Path, prefix: str = "model.") -> None:
        self._stored_name: dict[str, str] = {}
        self._file: dict[str, SafetensorsFile | TorchFile] = {}
        for file_name in _weight_files(folder):
            path = folder / file_name
            file = TorchFile(path) if file_name == _TORCH else SafetensorsFile(path)
            self._file |= dict.fromkeys(file.tensors, file)
        # Embedding models are often saved without the language-model wrapper, and then without its prefix.
        bare = not any(stored_name.startswith(prefix) for stored_name in self._file)
        for stored_name in self._file:
            lacks = bare and not stored_name.startswith("lm_head.")
            self._stored_name[prefix + stored_name if lacks else stored_name] = stored_name

    @property
    def names(self) -> Collection[str]:
        return self._stored_name.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored_name = self._stored_name[name]
        return self._file[stored_name].tensors[stored_name].shape

    def ggml_type(self, name: str) -> str | None:
        return None

    def pieces(self, name: str, *, keep_blocks: bool) -> Iterator[RowPiece]:
        stored_name = self._stored_name[name]
        file = self._file[stored_name]
        info = file.tensors[stored_name]
        dtype = _READABLE.get(info.dtype)
        if dtype is None:
            raise ModelError(f"tensor {name} is stored as {info.dtype}, a quantisation that cannot be read")
        num_rows = info.shape[0] if info.shape else 1
        row_bytes = info.nbytes // max(1, num_rows)
        step = max(1, _CHUNK_BYTES // max(1, row_bytes))
        for start in range(0, num_rows, step):
            rows = np.arange(start, min(start + step, num_rows))
            part = (info.offset + start * row_bytes, rows.size * row_bytes)
            values: NDArray[Any] = file.bytes_at(*part).view(dtype).reshape(rows.size, *info.shape[1:])
            yield RowPiece(rows, values.astype(np.float32) if dtype == np.float64 else values, None)
            file.release(*part)


def _weight_files(folder: Path) -> list[str]:
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    index_path = folder / _INDEX
    if not index_path.is_file():
        if (folder / _TORCH).is_file():
            return [_TORCH]
        raise ModelError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
    try:
        weight_map: dict[str, str] = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        file_names = sorted(set(weight_map.values()))
        outside = [file_name for file_name in file_names if Path(file_name).name != file_name]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{index_path} is not a safetensors index: {error!r}") from error
    if outside:
        raise ModelError(f"{index_path} names files that are not in its folder: {', '.join(outside)}")
    return file_names
