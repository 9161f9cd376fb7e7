"""The decoder families of the Hugging Face hub that there is an implementation of: `FAMILIES`.

Owns: what transformers calls them, and what it assumes for keys that their config.json leaves out. Never does: read a
file.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["CLASSES", "FAMILIES", "HEADLESS", "Architecture", "Family"]

Architecture = Literal[
    "llama", "mistral", "qwen2", "qwen3",
    "phi3", "olmo2", "granite", "smollm3", "gemma2", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt2",
    "transformers",
]  # fmt: skip


class Family(NamedTuple):
    """Defaults of a config class of transformers."""

    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    num_kv_heads: int | None  # None: as many as attention heads
    head_dim: int | None = None  # None: hidden_size / num_heads
    hidden_size: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    tie_word_embeddings: bool = False
    activation: str = "silu"
    activation_key: str = "hidden_act"
    other_names: tuple[str, ...] = ()  # of model_type, beside the architecture's own


_GEMMA = {"head_dim": 256, "hidden_size": 2304, "num_layers": 26, "num_heads": 8, "bos_token_id": 2, "eos_token_id": 1}
_GELU = {"tie_word_embeddings": True, "activation": "gelu_pytorch_tanh", "activation_key": "hidden_activation"}

FAMILIES: dict[Architecture, Family] = {
    "llama": Family(32000, 11008, 2048, None, bos_token_id=1, eos_token_id=2),
    "mistral": Family(32000, 14336, 131072, 8, bos_token_id=1, eos_token_id=2),
    "qwen2": Family(151936, 22016, 32768, 32),
    "qwen3": Family(151936, 22016, 32768, 32, head_dim=128),
    "phi3": Family(
        32064, 8192, 4096, None, hidden_size=3072, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=32000
    ),
    "olmo2": Family(50304, 11008, 2048, None, rms_norm_eps=1e-5, eos_token_id=50279),
    "granite": Family(32000, 11008, 2048, None, bos_token_id=1, eos_token_id=2),
    "smollm3": Family(
        128256, 11008, 32768, 4,
        hidden_size=2048, num_layers=36, num_heads=16, rope_theta=2e6, bos_token_id=128000, eos_token_id=128001,
        tie_word_embeddings=True,
    ),
    "gemma2": Family(256000, 9216, 8192, 4, **_GEMMA, **_GELU),  # type: ignore[arg-type]
    "gemma3": Family(
        262208, 9216, 131072, 4, **_GEMMA, **_GELU, rope_theta=1e6, other_names=("gemma3_text",)  # type: ignore[arg-type]
    ),
    "mixtral": Family(
        32000, 14336, 131072, 8, rms_norm_eps=1e-5, rope_theta=1e6, bos_token_id=1, eos_token_id=2
    ),
    "qwen2_moe": Family(151936, 5632, 32768, 16, hidden_size=2048, num_layers=24, num_heads=16),
    "qwen3_moe": Family(151936, 6144, 32768, 4, hidden_size=2048, num_layers=24, num_heads=32),
    "gpt2": Family(
        50257, 3072, 1024, None,
        hidden_size=768, num_layers=12, num_heads=12, rms_norm_eps=1e-5, bos_token_id=50256, eos_token_id=50256,
        tie_word_embeddings=True, activation="gelu_new", activation_key="activation_function",
    ),
    # Any other: its files state what there is no telling without.
    "transformers": Family(0, 1, 0, None, hidden_size=0, num_layers=0, num_heads=0, activation=""),
}  # fmt: skip

CLASSES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GPT2LMHeadModel": "gpt2",
}

_PREFIXES = {
    cls.removesuffix("ForCausalLM").removesuffix("LMHeadModel"): architecture for cls, architecture in CLASSES.items()
}
_PREFIXES["Gemma3Text"] = _PREFIXES.pop("Gemma3")  # the other has eyes

# The same without a language model's head: bare, or with labels for a text or for each token.
HEADLESS: dict[str, Architecture] = {
    prefix + end: architecture
    for prefix, architecture in _PREFIXES.items()
    for end in ("Model", "ForSequenceClassification", "ForTokenClassification")
}
