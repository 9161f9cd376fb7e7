"""Tiny random models of every supported kind, saved by transformers: the oracle and the checkpoint at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["KINDS", "save_tiny_model"]

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

# name -> (transformers prefix, what differs from the base below)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 12}),
    "llama-llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": _LINEAR}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # large, so that every part of the model shows in the logits
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_tiny_model(kind: str, folder: Path, max_shard_size: str = "5GB", **changes: Any) -> Any:
    """A float32 transformers model with random weights, norms and biases included, saved to `folder`.

    `changes` override values of the configuration.
    """
    import transformers

    prefix, of_kind = KINDS[kind]
    config = getattr(transformers, f"{prefix}Config")(**{**_BASE, **of_kind, **changes})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().float()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
