"""Weights from a GGUF file, under their Hugging Face names and in Hugging Face row order.

Owns: names, row order and decoding. Never does: parse the file (`gguf_file` does) or define a quantisation (the
`gguf` package does).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from procengine.errors import ModelError
from procengine.gguf_file import GGUFFile, TensorInfo
from procengine.kernels.native.arguments import BFLOAT16
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
# What some architectures call otherwise, or have beside these.
_IN_BLOCK_OF = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_PLAIN: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: BFLOAT16,
    GGMLQuantizationType.F64: np.dtype(np.float64),
}

# llama.cpp rotates neighbouring pairs in models of this type, so its converter interleaves the two halves of each
# head's q and k rows. Qwen's are stored as they are.
_PERMUTED_ARCHITECTURES = ("llama",)

_PANEL = 32  # rows that packed matrices keep together: two threads that pack chunks do not meet in one

_CHUNK_ELEMENTS = 1 << 18  # decode piecewise: the float32 intermediates stay in cache and memory does not peak


class GGUFWeights:
    """A WeightSource over one GGUF file."""

    def __init__(self, path: Path, num_heads: int, num_kv_heads: int) -> None:
        self._file = GGUFFile(path)
        architecture = self._file.metadata.get("general.architecture")
        in_block = _IN_BLOCK | _IN_BLOCK_OF.get(str(architecture), {})
        self._info = {_hugging_face_name(name, in_block): info for name, info in self._file.tensors.items()}
        permuted = architecture in _PERMUTED_ARCHITECTURES
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
        as_blocks = keep_blocks and info.ggml_type not in _PLAIN
        raw = self._file.tensor_bytes(info.name)
        for rows, part in _chunks(info, num_heads):
            places = _unpermuted(rows, info.shape[0] // num_heads) if num_heads else rows
            chunk = raw[part] if len(info.shape) < 2 else raw[part].reshape(rows.size, -1)
            if as_blocks:
                yield RowPiece(places, chunk, info.ggml_type.name)
            else:
                yield RowPiece(places, _decode(chunk, name, info.ggml_type).reshape(rows.size, *info.shape[1:]), None)
            self._file.release(info.name, part.start, part.stop - part.start)


def _hugging_face_name(name: str, in_block: Mapping[str, str]) -> str:
    """The Hugging Face name of a GGUF tensor; one without counterpart keeps its own."""
    match = _BLOCK_NAME.fullmatch(name)
    if match is not None and match[2] in in_block:
        return f"model.layers.{match[1]}.{in_block[match[2]]}.{match[3]}"
    stem, _, kind = name.partition(".")
    return f"{_TOP_LEVEL[stem]}.{kind}" if stem in _TOP_LEVEL else name


def _chunks(info: TensorInfo, num_heads: int) -> Iterator[tuple[npt.NDArray[np.int64], slice]]:
    """Pieces of whole rows (whole heads, if the tensor has any) and which bytes they are. Vectors come in one piece."""
    num_rows = info.shape[0]
    step = num_rows
    if len(info.shape) > 1:
        unit = num_rows // num_heads if num_heads else _PANEL
        step = max(1, _CHUNK_ELEMENTS // (unit * info.shape[1])) * unit
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        first, end = (info.nbytes * row // num_rows for row in (start, stop))
        yield np.arange(start, stop), slice(first, end)


def _decode(raw: npt.NDArray[np.uint8], name: str, ggml_type: GGMLQuantizationType) -> npt.NDArray[Any]:
    """The values, in a dtype that holds them exactly (float64: to float32); the shape is that of the rows."""
    if ggml_type in _PLAIN:
        values = raw.view(_PLAIN[ggml_type])
        return values.astype(np.float32) if values.dtype == np.float64 else values
    try:
        return np.asarray(dequantize(raw, ggml_type))
    except NotImplementedError as error:
        raise ModelError(f"tensor {name} has the unsupported type {ggml_type.name}") from error


def _unpermuted(rows: npt.NDArray[np.int64], head_dim: int) -> npt.NDArray[np.int64]:
    """Where rows of interleaved halves belong: the converter put row i + j * head_dim/2 of a head at 2i + j."""
    head, at = rows // head_dim, rows % head_dim
    places: npt.NDArray[np.int64] = head * head_dim + at % 2 * (head_dim // 2) + at // 2
    return places
