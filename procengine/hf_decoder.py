"""In what a Hugging Face decoder departs from the Llama family: `HuggingFaceDecoder(...).resolve()`.

Owns: how the keys of config.json map to `DecoderConfig`; defaults for absent keys are those of transformers. Never
does: read sizes that all decoders have (see `hf_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from procengine.config import DecoderConfig, ExpertsConfig
from procengine.hf_families import Architecture
from procengine.hf_files import HuggingFaceFolder
from procengine.hf_layers import HuggingFaceLayers
from procengine.hf_rope import HuggingFaceRope
from procengine.model_limits import why_not_a_size

__all__ = ["HuggingFaceDecoder"]


class HuggingFaceDecoder:
    """One resolution of `config`, the parsed config.json of `folder`; `sizes` are fields of ModelConfig."""

    def __init__(
        self,
        folder: HuggingFaceFolder,
        config: Mapping[str, Any],
        architecture: Architecture,
        sizes: Mapping[str, int],
        rope: HuggingFaceRope,
    ) -> None:
        self.folder = folder
        self.config = config
        self.architecture = architecture
        self.sizes = sizes
        self.rope = rope
        self.layers = HuggingFaceLayers(folder, config, architecture, sizes["num_layers"])

    def resolve(self) -> DecoderConfig:
        facts = self._of_family()
        window = self.layers.window()
        return replace(
            facts,
            plain_layers=self.layers.plain_layers(),
            global_layers=() if window is None else self.layers.global_layers(),
            is_causal=bool(self.config.get("is_causal", True)),
        )

    def _of_family(self) -> DecoderConfig:
        match self.architecture:
            case "phi3":
                rotary_dim = self.rope.rotary_dim(self.sizes["head_dim"])
                return DecoderConfig(rotary_dim=None if rotary_dim == self.sizes["head_dim"] else rotary_dim)
            case "olmo2":
                return DecoderConfig(norms="post", qk_norm_is_whole=True)
            case "granite":
                return self._granite()
            case "gemma2":
                return self._gemma(attention_softcap=50.0, logits_softcap=30.0)
            case "gemma3":
                return replace(self._gemma(None, None), local_rope_theta=self.rope.local_theta())
            case "gpt2":
                return self._gpt2()
            case "mixtral" | "qwen2_moe" | "qwen3_moe":
                return DecoderConfig(experts=self._experts())
            case _:
                return DecoderConfig()

    def _granite(self) -> DecoderConfig:
        return DecoderConfig(
            attention_scale=self._number("attention_multiplier", 1.0),
            embedding_scale=self._number("embedding_multiplier", 1.0),
            residual_scale=self._number("residual_multiplier", 1.0),
            logits_scale=1.0 / self._number("logits_scaling", 1.0),
        )

    def _gpt2(self) -> DecoderConfig:
        if self.config.get("scale_attn_by_inverse_layer_idx", False):
            raise self.folder.error("scale_attn_by_inverse_layer_idx is not supported")
        return DecoderConfig(attention_scale=None if self.config.get("scale_attn_weights", True) else 1.0)

    def _gemma(self, attention_softcap: float | None, logits_softcap: float | None) -> DecoderConfig:
        if self.config.get("use_bidirectional_attention"):
            raise self.folder.error("use_bidirectional_attention is not supported")
        return DecoderConfig(
            norms="both",
            norm_offset=1.0,
            activation="gelu_tanh",
            attention_scale=self._number("query_pre_attn_scalar", 256.0) ** -0.5,
            attention_softcap=self._softcap("attn_logit_softcapping", attention_softcap),
            logits_softcap=self._softcap("final_logit_softcapping", logits_softcap),
            embedding_scale=float(self.sizes["hidden_size"]) ** 0.5,
        )

    def _experts(self) -> ExpertsConfig:
        every = range(self.sizes["num_layers"])
        if self.architecture == "mixtral":
            return ExpertsConfig(
                num_experts=self._count(8, "num_local_experts", "num_experts"),
                num_experts_per_token=self._count(2, "num_experts_per_tok"),
                intermediate_size=self.sizes["intermediate_size"],
                renormalize=True,
                layers=tuple(every),
            )
        is_second = self.architecture == "qwen2_moe"
        step, plain = int(self.config.get("decoder_sparse_step", 1)), self.config.get("mlp_only_layers") or ()
        return ExpertsConfig(
            num_experts=self._count(60 if is_second else 128, "num_experts", "num_local_experts"),
            num_experts_per_token=self._count(4 if is_second else 8, "num_experts_per_tok"),
            intermediate_size=self._count(1408 if is_second else 768, "moe_intermediate_size"),
            renormalize=bool(self.config.get("norm_topk_prob", False)),
            shared_intermediate_size=self._count(5632, "shared_expert_intermediate_size") if is_second else 0,
            layers=tuple(layer for layer in every if (layer + 1) % step == 0 and layer not in plain),
        )

    def _number(self, key: str, default: float) -> float:
        return float(self.config.get(key, default))

    def _softcap(self, key: str, default: float | None) -> float | None:
        value = self.config.get(key, default)
        return None if value is None else float(value)

    def _count(self, default: int, *keys: str) -> int:
        """The number under the first of `keys` that is there."""
        key = next((key for key in keys if key in self.config), keys[0])
        value = self.config.get(key, default)
        if (wrong := why_not_a_size("intermediate_size", value)) is not None:
            raise self.folder.error(f"config.json: {key} {wrong}")
        return int(value)
