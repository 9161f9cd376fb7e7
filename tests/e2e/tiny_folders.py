"""Tiny random models of each family as Hugging Face folders, tokenizer included: what users serve, in miniature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from procengine.gguf_tokenizer import build_tokenizer
from tests.tiny_tokenizers import WORDS, byte_level_metadata

__all__ = ["FAMILIES", "VOCAB_SIZE", "base_config", "build_tiny_model", "save_folder"]

VOCAB_SIZE = 500  # more than the tokenizer has: padded vocabularies are common

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # large enough that continuations wander instead of repeating one token
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

# name -> (transformers prefix, what differs from the base)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 24}),  # not hidden_size / num_attention_heads
    "mistral": ("Mistral", {"sliding_window": 50}),  # shorter than many a prompt of the tests
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}

# Seeds for which no two best tokens come close, on the prompts of the tests; the tests check that.
_SEEDS = {"llama": 2, "mistral": 3, "qwen2": 1, "qwen3": 1}
_HEAD_STD = 0.75  # gives logits a deviation of about 6: clear winners, and still something to draw from


def base_config() -> dict[str, Any]:
    """What the configurations of all families here have in common."""
    return dict(_BASE)


def build_tiny_model(family: str) -> Any:
    """A float32 transformers model with random weights, norms and biases included; the same one every time."""
    import transformers

    prefix, changes = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**_BASE, **changes})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_SEEDS[family])
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().float()
        model.lm_head.weight.normal_(0.0, _HEAD_STD)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


def save_folder(model: Any, folder: Path, eos_token_id: int | None = None) -> Path:
    """`model` in `folder` as transformers saves it, with a byte-level tokenizer.json and that end token."""
    model.save_pretrained(folder)
    build_tokenizer(byte_level_metadata(WORDS), "tiny").save(str(folder / "tokenizer.json"))
    # Models with labels generate nothing, and have no second one.
    for path in filter(Path.is_file, (folder / "config.json", folder / "generation_config.json")):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos_token_id}))
    return folder
