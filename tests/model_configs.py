"""ModelConfigs for tests: from a transformers config, written out by hand so that no resolver has to exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from procengine.config import ModelConfig, RopeScaling

__all__ = ["SMOLLM2", "model_config_from_hf", "smollm2_config"]

SMOLLM2 = ModelConfig(
    name="smollm2",
    path="",
    format="gguf",
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
)


def smollm2_config(gguf_path: Path) -> ModelConfig:
    """SmolLM2-135M-Instruct as its GGUF file states it."""
    return replace(SMOLLM2, path=str(gguf_path))


def replace(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A copy of a frozen config with some fields changed."""
    fields: dict[str, Any] = {name: getattr(config, name) for name in config.__struct_fields__}
    return ModelConfig(**{**fields, **changes})


def model_config_from_hf(hf: Any, path: Path, **changes: Any) -> ModelConfig:
    """What a resolver would read from a transformers config object, for the Llama family."""
    architecture = hf.model_type
    bias = bool(getattr(hf, "attention_bias", False))
    config = ModelConfig(
        name="tiny",
        path=str(path),
        format="safetensors",
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        max_position_embeddings=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=hf.rope_parameters["rope_theta"],
        rope_scaling=_rope_scaling(hf.rope_parameters),
        tie_word_embeddings=hf.tie_word_embeddings,
        qkv_bias=bias or architecture == "qwen2",
        attention_output_bias=bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        sliding_window=getattr(hf, "sliding_window", None),
    )
    return replace(config, **changes)


def _rope_scaling(parameters: dict[str, Any]) -> RopeScaling:
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return RopeScaling()
    known = RopeScaling.__struct_fields__
    return RopeScaling(kind=kind, **{name: value for name, value in parameters.items() if name in known})
