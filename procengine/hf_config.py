"""What a Hugging Face model folder says, as a `ModelConfig`: `HuggingFaceConfig(name, path).resolve()`.

Owns: how the keys of config.json map to `ModelConfig`; defaults for absent keys are those of transformers' config
classes. Never does: import transformers, or default silently: what the engine cannot run exactly is a ModelError here,
not a wrong answer later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from procengine.config import DType, ModelConfig
from procengine.hf_embedding import read_embedding
from procengine.hf_files import HuggingFaceFolder, safetensors_dtype
from procengine.hf_rope import HuggingFaceRope
from procengine.model_limits import why_not_a_size

__all__ = ["HuggingFaceConfig"]

_Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]


class _Defaults(NamedTuple):
    """What transformers assumes for keys that a config.json leaves out."""

    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    num_kv_heads: int | None  # None: as many as attention heads
    head_dim: int | None = None  # None: hidden_size / num_heads
    hidden_size: int = 4096
    bos_token_id: int | None = None
    eos_token_id: int | None = None


_CLASSES: dict[str, _Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULTS: dict[_Architecture, _Defaults] = {
    "llama": _Defaults(32000, 11008, 2048, None, bos_token_id=1, eos_token_id=2),
    "mistral": _Defaults(32000, 14336, 131072, 8, bos_token_id=1, eos_token_id=2),
    "qwen2": _Defaults(151936, 22016, 32768, 32),
    "qwen3": _Defaults(151936, 22016, 32768, 32, head_dim=128),
}
_DEFAULT_WINDOW = 4096  # mistral, and qwen with use_sliding_window
_DEFAULT_RMS_NORM_EPS = 1e-6


class HuggingFaceConfig:
    """One resolution of a folder; `config` is its parsed config.json."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.folder = HuggingFaceFolder(path)
        self.config = self.folder.read_json("config.json")
        self.architecture = self._find_architecture()
        self.defaults = _DEFAULTS[self.architecture]

    def resolve(self) -> ModelConfig:
        self._check_supported()
        weights = self.folder.find_weights()
        tokenizer_config = self.folder.read_json("tokenizer_config.json", missing_ok=True)
        bos, eos = (_token_string(tokenizer_config.get(key)) for key in ("bos_token", "eos_token"))
        rope = HuggingFaceRope(self.folder, self.config, self.defaults.max_position_embeddings)
        return ModelConfig(
            name=self.name,
            path=str(self.folder.path.absolute()),
            format="safetensors",
            architecture=self.architecture,
            **self._sizes(),
            rms_norm_eps=float(self.config.get("rms_norm_eps", _DEFAULT_RMS_NORM_EPS)),
            rope_theta=rope.theta(),
            rope_scaling=rope.scaling(),
            tie_word_embeddings=bool(self.config.get("tie_word_embeddings", False)),
            qkv_bias=self.architecture == "qwen2" or self._attention_bias(),
            attention_output_bias=self._attention_bias(),
            mlp_bias=self.architecture == "llama" and bool(self.config.get("mlp_bias", False)),
            qk_norm=self.architecture == "qwen3",
            sliding_window=self._sliding_window(),
            bos_token_id=self.config.get("bos_token_id", self.defaults.bos_token_id),
            eos_token_ids=self._eos_token_ids(eos),
            tokenizer_path=str(self.folder.find_tokenizer()),
            chat_template=self.folder.chat_template(tokenizer_config),
            chat_bos_token=bos,
            chat_eos_token=eos,
            weights_dtype=self._dtype(weights),
            **read_embedding(self.folder, pooling="last", normalize=True, is_causal=True),
        )

    def _find_architecture(self) -> _Architecture:
        classes = self.config.get("architectures") or []
        model_type = self.config.get("model_type")
        for cls in classes:
            if cls in _CLASSES:
                return _CLASSES[cls]
        if not classes and model_type in _DEFAULTS:
            return cast(_Architecture, model_type)
        raise self.folder.error(
            f"the architecture {', '.join(classes) or model_type!r} is not supported; supported: {', '.join(_CLASSES)}"
        )

    def _check_supported(self) -> None:
        activation = self.config.get("hidden_act", "silu")
        if activation != "silu":
            raise self.folder.error(f"hidden_act {activation!r} is not supported; supported: silu")
        quantization = self.config.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise self.folder.error(
                f"weights quantised by {method!r} are not supported; use unquantised ones or a .gguf"
            )

    def _sizes(self) -> dict[str, Any]:
        hidden_size = self._size("hidden_size", self.defaults.hidden_size)
        num_heads = self._size("num_heads", 32, key="num_attention_heads")
        default_head_dim = self.defaults.head_dim or hidden_size // num_heads
        num_kv_heads = self._size(
            "num_kv_heads", self.defaults.num_kv_heads or num_heads, key="num_key_value_heads", null=num_heads
        )
        if num_heads % num_kv_heads:
            raise self.folder.error(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads")
        return {
            "vocab_size": self._size("vocab_size", self.defaults.vocab_size),
            "hidden_size": hidden_size,
            "intermediate_size": self._size("intermediate_size", self.defaults.intermediate_size),
            "num_layers": self._num_layers(),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": self._size("head_dim", default_head_dim, null=default_head_dim),
            "max_position_embeddings": self._size("max_position_embeddings", self.defaults.max_position_embeddings),
        }

    def _attention_bias(self) -> bool:
        # Mistral never has biases and Qwen2 always has the three input ones, whatever this key says.
        return self.architecture in ("llama", "qwen3") and bool(self.config.get("attention_bias", False))

    def _num_layers(self) -> int:
        return self._size("num_layers", 32, key="num_hidden_layers")

    def _size(self, field: str, default: int, key: str | None = None, null: int | None = None) -> int:
        """The number for `field` of ModelConfig under `key` (its own name), `default` if absent, `null` if null."""
        key = key or field
        value = self.config.get(key, default)
        if value is None and null is not None:
            return null
        if (wrong := why_not_a_size(field, value)) is not None:
            raise self.folder.error(f"config.json: {key} {wrong}")
        return int(value)

    def _sliding_window(self) -> int | None:
        if self.architecture == "llama":
            return None
        window: int | None = self.config.get("sliding_window", _DEFAULT_WINDOW)
        if self.architecture == "mistral":
            return window
        if not self.config.get("use_sliding_window", False) or window is None:
            return None
        return window if self._every_layer_slides() else None

    def _every_layer_slides(self) -> bool:
        num_layers = self._num_layers()
        kinds = self.config.get("layer_types")
        if kinds is None:  # layers from max_window_layers on slide
            first = int(self.config.get("max_window_layers", 28))
            kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
        if len(set(kinds)) > 1:
            raise self.folder.error("sliding attention in some layers and full attention in others is not supported")
        return bool(kinds) and kinds[0] == "sliding_attention"

    def _eos_token_ids(self, eos_token: str) -> tuple[int, ...]:
        generation = self.folder.read_json("generation_config.json", missing_ok=True)
        ids = generation.get("eos_token_id")
        if ids is None:
            ids = self.config.get("eos_token_id", self.defaults.eos_token_id)
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        # A chat model's turns end with its tokenizer's eos, which the config of its base model may not know.
        own = self.folder.added_token_id(eos_token)
        return tuple(dict.fromkeys([*listed, own] if own is not None else listed))

    def _dtype(self, weights: Path) -> DType:
        dtype = self.config.get("dtype") or self.config.get("torch_dtype") or safetensors_dtype(weights)
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise self.folder.error(
                f"weights of dtype {dtype} are not supported; supported: float32, bfloat16, float16"
            )
        return cast(DType, dtype)


def _token_string(token: object) -> str:
    if isinstance(token, dict):  # an AddedToken written out
        token = token.get("content")
    return token if isinstance(token, str) else ""
