"""What a Hugging Face model folder says, as a `ModelConfig`: `HuggingFaceConfig(name, path).resolve()`.

Owns: how the keys of config.json map to `ModelConfig`; defaults for absent keys are those of transformers' config
classes. Never does: import transformers, or default silently: what the engine cannot run exactly is a ModelError here,
not a wrong answer later.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from procengine.config import DType, HeadConfig, ModelConfig, RopeScaling
from procengine.hf_decoder import HuggingFaceDecoder
from procengine.hf_embedding import read_embedding
from procengine.hf_families import CLASSES, FAMILIES, HEADLESS, Architecture
from procengine.hf_files import HuggingFaceFolder, first_dtype
from procengine.hf_head import head_activation, read_labels
from procengine.hf_rope import HuggingFaceRope
from procengine.model_limits import why_not_a_size
from procengine.reranker import declared_tokens, with_reranker

__all__ = ["HuggingFaceConfig"]

# Names that GPT-2 and others have for what all have.
_OTHER_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}
_BIASED: tuple[Architecture, ...] = ("llama", "qwen3", "granite", "olmo2", "smollm3", "gemma2", "gemma3", "qwen3_moe")


class HuggingFaceConfig:
    """One resolution of a folder; `config` is its parsed config.json."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.folder = HuggingFaceFolder(path)
        self.config = self.folder.read_json("config.json")
        self.architecture = self._find_architecture()
        self.defaults = FAMILIES[self.architecture]
        if self.architecture in ("gpt2", "transformers"):
            self.config = {_OTHER_KEYS.get(key, key): value for key, value in self.config.items()}
        if self.architecture == "gpt2" and self.config.get("intermediate_size") is None:
            self.config["intermediate_size"] = 4 * self._size("hidden_size", self.defaults.hidden_size)

    def resolve(self) -> ModelConfig:
        self._check_supported()
        weights = self.folder.find_weights()
        tokenizer_config = self.folder.read_json("tokenizer_config.json", missing_ok=True)
        bos, eos = (_token_string(tokenizer_config.get(key)) for key in ("bos_token", "eos_token"))
        rope = HuggingFaceRope(self.folder, self.config, self.architecture)
        sizes = self._sizes()
        is_ours = self.architecture != "transformers"
        if is_ours:
            rope.rotary_dim(sizes["head_dim"])
        decoder = HuggingFaceDecoder(self.folder, self.config, self.architecture, sizes, rope)
        head = self._head()
        model = ModelConfig(
            name=self.name,
            path=str(self.folder.path.absolute()),
            format="safetensors",
            architecture=self.architecture,
            **sizes,
            rms_norm_eps=float(self.config.get("rms_norm_eps", self.defaults.rms_norm_eps)),
            rope_theta=rope.theta() if is_ours else 0.0,
            rope_scaling=rope.scaling() if is_ours else RopeScaling(),
            tie_word_embeddings=self._is_headless()  # there is none to read, and nobody asks for logits
            or bool(self.config.get("tie_word_embeddings", self.defaults.tie_word_embeddings)),
            qkv_bias=self._qkv_bias(),
            attention_output_bias=self._attention_bias(),
            mlp_bias=self.architecture in ("llama", "granite", "smollm3") and bool(self.config.get("mlp_bias", False)),
            qk_norm=self.architecture in ("qwen3", "qwen3_moe", "olmo2", "gemma3"),
            sliding_window=decoder.layers.window(),
            bos_token_id=self.config.get("bos_token_id", self.defaults.bos_token_id),
            eos_token_ids=self._eos_token_ids(eos),
            tokenizer_path=str(self.folder.find_tokenizer()),
            chat_template=self.folder.chat_template(tokenizer_config),
            chat_bos_token=bos,
            chat_eos_token=eos,
            weights_dtype=self._dtype(weights),
            decoder=decoder.resolve(),
            **read_embedding(self.folder, pooling="last", normalize=True, is_causal=True),
            workflows=self._workflows(head),
            head=head,
        )
        tokens = declared_tokens(self.folder, self.config) if head is None else ()
        return with_reranker(model, tokens, None) if tokens or "score" in model.workflows else model

    def _is_headless(self) -> bool:
        """Whether it was saved without the head that generation needs, as embedding models are (MistralModel)."""
        return any(cls in HEADLESS for cls in self.config.get("architectures") or [])

    def _head(self) -> HeadConfig | None:
        """The labels, in transformers' way for decoders: a matrix behind the last norm, on a text's last token."""
        classes = [str(cls) for cls in self.config.get("architectures") or []]
        of_text = any(cls.endswith("ForSequenceClassification") for cls in classes)
        of_tokens = any(cls.endswith("ForTokenClassification") for cls in classes)
        if not (of_text or of_tokens):
            return None
        labels = read_labels(self.config)
        activation = head_activation(self.folder, self.config, len(labels))
        return HeadConfig(labels, activation, "last", "token" if of_tokens else "sequence", has_bias=of_tokens)

    def _workflows(self, head: HeadConfig | None) -> tuple[str, ...]:
        if not self._is_headless():
            return ("generate", "embed", "hidden_states", "score_text")
        if head is None:
            return ("embed", "hidden_states")
        if head.level == "token":
            return ("embed", "hidden_states", "token_classify", *(("reward",) if len(head.labels) == 1 else ()))
        return ("embed", "hidden_states", "classify", *(("score", "reward") if len(head.labels) == 1 else ()))

    def _find_architecture(self) -> Architecture:
        classes = self.config.get("architectures") or []
        model_type = self.config.get("model_type")
        for cls in classes:
            if cls in CLASSES or cls in HEADLESS:
                return CLASSES.get(cls) or HEADLESS[cls]
        for architecture, family in FAMILIES.items():
            if not classes and model_type in (architecture, *family.other_names):
                return architecture
        if any(str(cls).endswith(("ForCausalLM", "LMHeadModel")) for cls in classes) and find_spec("transformers"):
            return "transformers"
        raise self.folder.error(
            f"the architecture {', '.join(classes) or model_type!r} is not supported; supported: {', '.join(CLASSES)}; "
            "and other decoders with the extra `transformers` installed"
        )

    def _check_supported(self) -> None:
        key, supported = self.defaults.activation_key, self.defaults.activation
        activation = self.config.get(key) or supported
        if activation != supported and self.architecture != "transformers":
            raise self.folder.error(f"{key} {activation!r} is not supported; supported: {supported}")
        quantization = self.config.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise self.folder.error(
                f"weights quantised by {method!r} are not supported; use unquantised ones or a .gguf"
            )

    def _sizes(self) -> dict[str, Any]:
        hidden_size = self._size("hidden_size", self.defaults.hidden_size)
        num_heads = self._size("num_heads", self.defaults.num_heads, key="num_attention_heads")
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
        # The others never have biases, whatever this key says, or have those of the input only.
        return self.architecture in _BIASED and bool(self.config.get("attention_bias", False))

    def _qkv_bias(self) -> bool:
        if self.architecture == "qwen2_moe":
            return bool(self.config.get("qkv_bias", True))
        return self.architecture == "qwen2" or self._attention_bias()

    def _num_layers(self) -> int:
        return self._size("num_layers", self.defaults.num_layers, key="num_hidden_layers")

    def _size(self, field: str, default: int, key: str | None = None, null: int | None = None) -> int:
        """The number for `field` of ModelConfig under `key` (its own name), `default` if absent, `null` if null."""
        key = key or field
        value = self.config.get(key, default)
        if value is None and null is not None:
            return null
        if (wrong := why_not_a_size(field, value)) is not None:
            raise self.folder.error(f"config.json: {key} {wrong}")
        return int(value)

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
        dtype = self.config.get("dtype") or self.config.get("torch_dtype") or first_dtype(weights)
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
