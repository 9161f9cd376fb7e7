"""One table of the decoder families: a tiny random model of each, saved by transformers as users' folders are."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from procengine.config import ModelConfig
from procengine.model_source import resolve_model
from procengine.rope_scaling import rope_for_length
from tests import tiny_tokenizers

__all__ = ["FAMILIES", "TinyFamily", "save_family"]

VOCAB = 97
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # large, so that every part of the model shows in the logits
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 9.0],
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


@dataclass(frozen=True)
class TinyFamily:
    """What transformers calls it and what differs from the base; `seed`: one for which greedy tokens are clear."""

    prefix: str
    changes: dict[str, Any] = field(default_factory=dict)
    seed: int = 5
    base: dict[str, Any] = field(default_factory=lambda: _BASE)


FAMILIES: dict[str, TinyFamily] = {
    "phi3": TinyFamily("Phi3", {"sliding_window": 11}),
    "phi4-longrope": TinyFamily("Phi3", {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 128,
                                         "max_position_embeddings": 512}),
    "phi4-longrope-long": TinyFamily("Phi3", {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 8}),
    "olmo2": TinyFamily("Olmo2"),
    "granite": TinyFamily("Granite", {"embedding_multiplier": 2.5, "attention_multiplier": 0.4,
                                      "residual_multiplier": 0.7, "logits_scaling": 0.5, "attention_bias": True}),
    "smollm3": TinyFamily("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "gemma2": TinyFamily("Gemma2", {"sliding_window": 7, "head_dim": 12, "query_pre_attn_scalar": 10,
                                    "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0}),
    "gemma3": TinyFamily("Gemma3", {"sliding_window": 7, "head_dim": 16, "tie_word_embeddings": True,
                                    "layer_types": ["sliding_attention", "full_attention"],
                                    "query_pre_attn_scalar": 10}),
    "mixtral": TinyFamily("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": TinyFamily("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2}),
    "qwen3-moe": TinyFamily("Qwen3Moe", {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3-mixed-window": TinyFamily("Qwen3", {"head_dim": 16, "sliding_window": 9, "use_sliding_window": True,
                                               "max_window_layers": 1}),
    "gpt2": TinyFamily("GPT2", base=_GPT2),
}  # fmt: skip


def save_family(name: str, folder: Path, **changes: Any) -> tuple[Any, ModelConfig]:
    """A float32 transformers model with random weights, norms and biases included, and what we read of its folder.

    `changes` override values of the configuration.
    """
    import transformers

    family = FAMILIES[name]
    prefix = "Gemma3Text" if family.prefix == "Gemma3" else family.prefix
    config = getattr(transformers, f"{prefix}Config")(**{**family.base, **family.changes, **changes})
    suffix = "LMHeadModel" if family.prefix == "GPT2" else "ForCausalLM"
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(family.seed)
        model = getattr(transformers, f"{family.prefix}{suffix}")(config).eval().float()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(folder)
    tiny_tokenizers.byte_level().backend.save(str(folder / "tokenizer.json"))
    return model, rope_for_length(resolve_model(str(folder), folder / "home"), max_model_len=128)
