"""What the metadata of a GGUF file says, as a `ModelConfig`: `GGUFConfig(file).resolve()`.

Owns: how GGUF keys and tensor names map to `ModelConfig`; defaults for absent keys are those of llama.cpp. Never does:
default silently: what the engine cannot run exactly is a ModelError here, not a wrong answer later. `name` and
`tokenizer_path` are left to the caller, who knows what was asked for and where the converted tokenizer goes.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np

from procengine.config import DecoderConfig, DType, ModelConfig, RopeScaling
from procengine.errors import ModelError
from procengine.gguf_file import GGUFFile
from procengine.gguf_tokenizer import end_token_ids, token_text
from procengine.model_limits import why_not_a_size
from procengine.rope_scaling import llama3_divisors, yarn_mscale

__all__ = ["GGUFConfig"]

_Architecture = Literal["llama", "qwen2", "qwen3", "gemma3"]
_SUPPORTED = ("llama", "qwen2", "qwen3", "gemma3")  # Mistral's files say llama
# Of Gemma 3, in llama.cpp's code and not in the file.
_LOCAL_LAYERS = 6  # every so manieth layer sees all tokens, the others a window
_LOCAL_ROPE_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62  # the one size whose scores are not scaled by its head size
_DEFAULT_ROPE_THETA = 10000.0


class GGUFConfig:
    """One resolution of a GGUF file; keys without a prefix are those of its architecture (`llama.*`)."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = self._find_architecture()

    def resolve(self) -> ModelConfig:
        metadata = self.file.metadata
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        template = metadata.get("tokenizer.chat_template")
        return ModelConfig(
            name="",
            path=str(self.file.path),
            format="gguf",
            architecture=self.architecture,
            **self._sizes(),
            rms_norm_eps=float(self._value("attention.layer_norm_rms_epsilon")),
            rope_theta=float(self._value("rope.freq_base", _DEFAULT_ROPE_THETA)),
            rope_scaling=self._rope_scaling(),
            tie_word_embeddings="output.weight" not in self.file.tensors,
            qkv_bias="blk.0.attn_q.bias" in self.file.tensors,
            attention_output_bias="blk.0.attn_output.bias" in self.file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self.file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self.file.tensors,
            sliding_window=self._value("attention.sliding_window", None) or None,
            bos_token_id=bos,
            eos_token_ids=end_token_ids(metadata),
            chat_template=template if isinstance(template, str) else None,
            chat_bos_token=token_text(metadata, bos),
            chat_eos_token=token_text(metadata, metadata.get("tokenizer.ggml.eos_token_id")),
            weights_dtype=self._dtype(),
            decoder=self._gemma3() if self.architecture == "gemma3" else DecoderConfig(),
        )

    def _find_architecture(self) -> _Architecture:
        found = self.file.metadata.get("general.architecture")
        if found not in _SUPPORTED:
            raise self._error(f"general.architecture {found!r} is not supported; supported: {', '.join(_SUPPORTED)}")
        if self.file.metadata.get(f"{found}.expert_count"):
            raise self._error("mixture-of-experts models are not supported")
        return cast(_Architecture, found)

    def _gemma3(self) -> DecoderConfig:
        """Norm weights need no offset: the converter has added it."""
        sizes = self._sizes()
        num_layers, hidden_size = sizes["num_layers"], sizes["hidden_size"]
        per_head = hidden_size // sizes["num_heads"] if num_layers == _GEMMA3_27B_LAYERS else sizes["head_dim"]
        period = int(self._value("attention.sliding_window_pattern", _LOCAL_LAYERS))
        softcap = self._value("final_logit_softcapping", None)
        return DecoderConfig(
            norms="both",
            activation="gelu_tanh",
            local_rope_theta=float(self._value("rope.freq_base_swa", _LOCAL_ROPE_THETA)),
            global_layers=tuple(layer for layer in range(num_layers) if (layer + 1) % period == 0),
            attention_scale=float(per_head) ** -0.5,
            logits_softcap=None if softcap is None else float(softcap),
            embedding_scale=float(hidden_size) ** 0.5,
        )

    def _sizes(self) -> dict[str, Any]:
        hidden_size = self._size("hidden_size", "embedding_length")
        num_heads = self._size("num_heads", "attention.head_count")
        head_dim = self._size("head_dim", "attention.key_length", hidden_size // num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (found := self._size("head_dim", key, head_dim)) != head_dim:
                raise self._error(f"{key} is {found}, which differs from the head size {head_dim}")
        return {
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden_size,
            "intermediate_size": self._size("intermediate_size", "feed_forward_length"),
            "num_layers": self._size("num_layers", "block_count"),
            "num_heads": num_heads,
            "num_kv_heads": self._size("num_kv_heads", "attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._num_positions("context_length"),
        }

    def _vocab_size(self) -> int:
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise self._error("there is no tensor token_embd.weight of two dimensions")
        return embedding.shape[0]

    def _rope_scaling(self) -> RopeScaling:
        kind = self._value("rope.scaling.type", "none")
        if "rope_freqs.weight" in self.file.tensors:
            return self._llama3_scaling()
        if kind == "none":
            factor = float(self._value("rope.scale_linear", 1.0))  # how files older than rope.scaling.* say it
            return RopeScaling() if factor == 1.0 else RopeScaling(kind="linear", factor=factor)
        if kind not in ("linear", "yarn"):
            raise self._error(f"rope scaling {kind!r} is not supported; supported: none, linear, yarn, llama3")
        factor = float(self._value("rope.scaling.factor"))
        trained = self._num_positions("rope.scaling.original_context_length", self._num_positions("context_length"))
        scale = float(self._value("rope.scaling.attn_factor", 1.0))
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_max_position_embeddings=trained,
            beta_fast=float(self._value("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self._value("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=None if scale == 1.0 else scale * yarn_mscale(factor, 1.0),
        )

    def _llama3_scaling(self) -> RopeScaling:
        """Llama 3.1's scaling is not in the metadata but as a tensor of divisors of the frequencies.

        Its longest wavelengths are divided by `factor`; the other numbers are Llama 3's own, and are checked.
        """
        stored = self.file.tensor_bytes("rope_freqs.weight").view(np.float32)
        scaling = RopeScaling(kind="llama3", factor=float(stored[-1]), original_max_position_embeddings=8192)
        head_dim = self._size("head_dim", "rope.dimension_count", 2 * len(stored))
        theta = float(self._value("rope.freq_base", _DEFAULT_ROPE_THETA))
        if not np.allclose(stored, llama3_divisors(scaling, theta, head_dim), rtol=1e-3):
            raise self._error("rope_freqs.weight holds a rope scaling that is not Llama 3's, which is not supported")
        return scaling

    def _dtype(self) -> DType:
        num_bytes: dict[str, int] = {}
        for info in self.file.tensors.values():
            num_bytes[info.ggml_type.name] = num_bytes.get(info.ggml_type.name, 0) + info.nbytes
        most = max(num_bytes, key=num_bytes.__getitem__, default="")
        plain: dict[str, DType] = {"F32": "float32", "F16": "float16"}
        return plain.get(most, "bfloat16")  # rounding to bfloat16 is small beside what any quantisation lost

    def _value(self, key: str, *default: Any) -> Any:
        full = f"{self.architecture}.{key}"
        if full in self.file.metadata:
            return self.file.metadata[full]
        if not default:
            raise self._error(f"the key {full} is missing")
        return default[0]

    def _num_positions(self, key: str, *default: int) -> int:
        return self._size("max_position_embeddings", key, *default)

    def _size(self, field: str, key: str, *default: int) -> int:
        """The number under `key` that is this field of ModelConfig."""
        value = self._value(key, *default)
        if (wrong := why_not_a_size(field, value)) is not None:
            raise self._error(f"{self.architecture}.{key} {wrong}")
        return int(value)

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self.file.path}: {message}")
