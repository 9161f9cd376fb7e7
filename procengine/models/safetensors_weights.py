"""Weights from a Hugging Face folder: `model.safetensors`, or shards listed by `model.safetensors.index.json`.

Owns: finding the file of each tensor. Never does: copy a file into memory; tensors come from the mapped file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from procengine.errors import ModelError
from procengine.models.weights import RowPiece
from procengine.safetensors_file import SafetensorsFile

__all__ = ["SafetensorsWeights"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CHUNK_ROWS = 2048
_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class SafetensorsWeights:
    """A WeightSource over the safetensors files of one folder."""

    def __init__(self, folder: Path) -> None:
        file_names = _weight_files(folder)
        self._stored_name: dict[str, str] = {}
        self._file: dict[str, Any] = {}  # `safe_open` has no public type
        self._shape: dict[str, tuple[int, ...]] = {}
        for file_name in file_names:
            headers = SafetensorsFile(folder / file_name).tensors  # checked, before anybody else reads it
            self._shape |= {stored_name: info.shape for stored_name, info in headers.items()}
            self._file |= dict.fromkeys(headers, _open(folder / file_name))
        # Embedding models are often saved without the language-model wrapper, and then without its prefix.
        bare = not any(stored_name.startswith("model.") for stored_name in self._file)
        for stored_name in self._file:
            prefix = "model." if bare and not stored_name.startswith("lm_head.") else ""
            self._stored_name[prefix + stored_name] = stored_name

    @property
    def names(self) -> Collection[str]:
        return self._stored_name.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape[self._stored_name[name]]

    def ggml_type(self, name: str) -> str | None:
        return None

    def read_into(self, name: str, destination: Tensor) -> None:
        destination.copy_(self._tensor(name))

    def pieces(self, name: str, *, keep_blocks: bool) -> Iterator[RowPiece]:
        tensor = self._tensor(name)
        for start in range(0, tensor.shape[0], _CHUNK_ROWS):
            chunk = tensor[start : start + _CHUNK_ROWS]
            rows = torch.arange(start, start + chunk.shape[0])
            yield RowPiece(rows, chunk.float() if chunk.dtype == torch.float64 else chunk, None)

    def release(self, name: str) -> None:
        pass  # the mapping belongs to the reader, and goes with it

    def _tensor(self, name: str) -> Tensor:
        stored_name = self._stored_name[name]
        tensor: Tensor = self._file[stored_name].get_tensor(stored_name)
        if tensor.dtype not in _READABLE:
            raise ModelError(f"tensor {name} is stored as {tensor.dtype}, a quantisation that cannot be read")
        return tensor


def _weight_files(folder: Path) -> list[str]:
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    index_path = folder / _INDEX
    if not index_path.is_file():
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


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
