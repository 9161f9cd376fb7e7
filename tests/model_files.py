"""Writes the files of small models, for tests of what is read from them: Hugging Face folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from procengine.config import ModelConfig
from procengine.model_source import resolve_model
from tests import tiny_tokenizers

__all__ = ["LLAMA", "LLAMA3_ROPE", "SIZES", "TENSORS", "resolve", "without", "write_folder", "write_gguf"]

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", **SIZES}

LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}

TENSORS = {"token_embd.weight": (300, 64), "output.weight": (300, 64)}


def write_folder(folder: Path, config: dict[str, Any], **files: dict[str, Any] | str) -> Path:
    """A model folder with an (empty) safetensors file; `files` are further files, `__` standing for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    tiny_tokenizers.byte_level().backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def resolve(tmp_path: Path, config: dict[str, Any], **files: dict[str, Any] | str) -> ModelConfig:
    """What resolve_model says of the folder that `write_folder` writes."""
    return resolve_model(str(write_folder(tmp_path / "model", config, **files)), tmp_path / "home")


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A copy of `config` that lacks `keys`."""
    return {key: value for key, value in config.items() if key not in keys}


def write_gguf(path: Path, architecture: str = "llama", tensors: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A GGUF file with the header of a small model; keys override, None leaves one out, `__` stands for a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
        "attention__head_count": 4, "attention__head_count_kv": 2, "attention__layer_norm_rms_epsilon": 1e-5, **keys,
    }  # fmt: skip
    for key, value in values.items():
        if value is not None:
            add_key(writer, f"{architecture}.{key.replace('__', '.')}", value)
    for key, value in tiny_tokenizers.byte_level_metadata(tiny_tokenizers.WORDS, pre="smollm").items():
        add_key(writer, key, value)
    for name, shape in (TENSORS if tensors is None else tensors).items():
        data = shape if isinstance(shape, np.ndarray) else np.zeros(shape, dtype=np.float32)
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            if value:
                writer.add_array(key, value)
