"""Writes GGUF files from Hugging Face tensors, the way llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["write_gguf"]

Quantize = Callable[[npt.NDArray[np.float32], gguf.GGMLQuantizationType], npt.NDArray[Any]]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    architecture: str,
    tensors: dict[str, Tensor],
    heads: tuple[int, int],
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, npt.NDArray[Any]] | None = None,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    quantize: Quantize = gguf.quantize,
) -> None:
    """Matrices in `matrix_type`, or what `types` says of them by name, by `quantize`; vectors in float32; q and k rows
    interleaved for architecture "llama"."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        part = next((part for part in ("q_proj", "k_proj") if part in name), None)
        if architecture == "llama" and part is not None:
            values = _interleave(values, heads[part == "k_proj"])
        if values.ndim == 1:
            writer.add_tensor(_gguf_name(name), values)
        else:
            own_type = (types or {}).get(name, matrix_type)
            writer.add_tensor(_gguf_name(name), quantize(values, own_type), raw_dtype=own_type)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """The two halves of each head's rows, taken in turns."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{_NAMES[part]}.{kind}"
