"""Weights from a GGUF file, under their Hugging Face names and in Hugging Face row order.

Owns: names, row order and decoding. Never does: parse the file (`gguf_file` does) or define a quantisation (the
`gguf` package does).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from procengine.errors import ModelError
from procengine.gguf_file import GGUFFile, TensorInfo
from procengine.models.weights import RowPiece

__all__ = ["GGUFWeights"]

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}

# llama.cpp rotates neighbouring pairs in models of this type, so its converter interleaves the two halves of each
# head's q and k rows. Qwen's are stored as they are.
_PERMUTED_ARCHITECTURES = ("llama",)

_PANEL = 32  # rows that packed matrices keep together: two threads that pack chunks do not meet in one

_CHUNK_ELEMENTS = 1 << 20  # decode piecewise: the float32 intermediate stays in cache and memory does not peak


class GGUFWeights:
    """A WeightSource over one GGUF file."""

    def __init__(self, path: Path, num_heads: int, num_kv_heads: int) -> None:
        self._file = GGUFFile(path)
        self._info = {_hugging_face_name(name): info for name, info in self._file.tensors.items()}
        permuted = self._file.metadata.get("general.architecture") in _PERMUTED_ARCHITECTURES
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads} if permuted else {}

    @property
    def names(self) -> Collection[str]:
        return self._info.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info[name].shape

    def ggml_type(self, name: str) -> str | None:
        stored = self._info[name].ggml_type
        return None if stored in _PLAIN else stored.name

    def pieces(self, name: str, *, keep_blocks: bool) -> Iterator[RowPiece]:
        info = self._info[name]
        num_heads = self._heads.get(name.split(".")[-2], 0)
        head_dim = info.shape[0] // num_heads if num_heads else 0
        as_blocks = keep_blocks and info.ggml_type not in _PLAIN
        for rows, chunk in _chunks(self._file.tensor_bytes(info.name), info, num_heads):
            places = torch.arange(info.shape[0])[rows]
            if num_heads:
                places = _unpermuted(places, head_dim)
            if as_blocks:
                yield RowPiece(places, torch.from_numpy(chunk.copy()), info.ggml_type.name)
            else:
                yield RowPiece(places, _decode(chunk, name, info.ggml_type).view(len(places), -1), None)

    def read_into(self, name: str, destination: Tensor) -> None:
        info = self._info[name]
        num_heads = self._heads.get(name.split(".")[-2], 0)
        raw = self._file.tensor_bytes(info.name)
        for rows, chunk in _chunks(raw, info, num_heads):
            values = _decode(chunk, name, info.ggml_type)
            if num_heads:
                _copy_unpermuted(values, destination[rows], info.shape[0] // num_heads)
            else:
                destination[rows].copy_(values.view_as(destination[rows]))

    def release(self, name: str) -> None:
        self._file.release(self._info[name].name)


def _hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; one without counterpart keeps its own."""
    match = _BLOCK_NAME.fullmatch(name)
    if match is not None and match[2] in _IN_BLOCK:
        return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.{match[3]}"
    stem, _, kind = name.partition(".")
    return f"{_TOP_LEVEL[stem]}.{kind}" if stem in _TOP_LEVEL else name


def _chunks(
    raw: npt.NDArray[np.uint8], info: TensorInfo, num_heads: int
) -> Iterator[tuple[slice, npt.NDArray[np.uint8]]]:
    """Pieces of whole rows (whole heads, if the tensor has any) with the rows they are. Vectors come in one piece."""
    if len(info.shape) < 2:
        yield slice(None), raw
        return
    num_rows = info.shape[0]
    unit = num_rows // num_heads if num_heads else _PANEL
    step = max(1, _CHUNK_ELEMENTS // (unit * info.shape[1])) * unit
    by_row = raw.reshape(num_rows, -1)
    for start in range(0, num_rows, step):
        yield slice(start, start + step), by_row[start : start + step]


def _decode(raw: npt.NDArray[np.uint8], name: str, ggml_type: GGMLQuantizationType) -> Tensor:
    """The values, in a dtype that holds them exactly; the shape is that of the rows."""
    if ggml_type in _PLAIN:
        # Copied: torch warns about views of read-only memory.
        return torch.from_numpy(raw.copy()).view(_PLAIN[ggml_type])
    try:
        values: npt.NDArray[Any] = dequantize(raw, ggml_type)
    except NotImplementedError as error:
        raise ModelError(f"tensor {name} has the unsupported type {ggml_type.name}") from error
    return torch.from_numpy(values)


def _unpermuted(rows: Tensor, head_dim: int) -> Tensor:
    """Where rows of interleaved halves belong, int64 like `rows`."""
    head, at = rows // head_dim, rows % head_dim
    return head * head_dim + at % 2 * (head_dim // 2) + at // 2


def _copy_unpermuted(values: Tensor, destination: Tensor, head_dim: int) -> None:
    """Undo the converter's interleaving: row 2i+j of a head goes to row i + j * head_dim/2."""
    halves = destination.view(-1, 2, head_dim // 2, *destination.shape[1:])
    halves.transpose(1, 2).copy_(values.view(-1, head_dim // 2, 2, *destination.shape[1:]))
