"""What an encoder's folder says, as a `ModelConfig`: `HuggingFaceEncoderConfig(name, path).resolve()`.

Owns: the keys of config.json of BERT, RoBERTa, XLM-RoBERTa and ModernBERT; defaults for absent keys are those of
transformers' config classes. Never does: import transformers, or run what it does not know exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from procengine.config import DType, EncoderConfig, HeadConfig, ModelConfig, Pooling
from procengine.hf_embedding import read_embedding
from procengine.hf_files import HuggingFaceFolder, first_dtype
from procengine.hf_head import head_activation, read_labels
from procengine.model_limits import why_not_a_size

__all__ = ["HuggingFaceEncoderConfig", "is_encoder"]

_Architecture = Literal["bert", "roberta", "xlm-roberta", "modernbert"]
_Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]

_CLASS_PREFIXES: dict[str, _Architecture] = {
    "Bert": "bert",
    "Roberta": "roberta",
    "XLMRoberta": "xlm-roberta",
    "ModernBert": "modernbert",
}
_CLASS_ENDS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForPreTraining")
_ACTIVATIONS: dict[str, _Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}


class _Defaults(NamedTuple):
    """What transformers assumes for keys that a config.json leaves out."""

    vocab_size: int
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_layers: int = 12
    max_position_embeddings: int = 512
    activation: str = "gelu"
    pad_token_id: int = 0


_DEFAULTS: dict[_Architecture, _Defaults] = {
    "bert": _Defaults(30522, pad_token_id=0),
    "roberta": _Defaults(50265, pad_token_id=1),
    "xlm-roberta": _Defaults(30522, pad_token_id=1),
    "modernbert": _Defaults(50368, intermediate_size=1152, num_layers=22, max_position_embeddings=8192),
}


def is_encoder(config: dict[str, Any]) -> bool:
    """Whether a config.json is one of a model that this module knows."""
    return _find_architecture(config) is not None


def _find_architecture(config: dict[str, Any]) -> _Architecture | None:
    classes = config.get("architectures") or []
    for cls in classes if isinstance(classes, list) else []:
        for prefix, architecture in _CLASS_PREFIXES.items():
            if str(cls) in {prefix + end for end in _CLASS_ENDS}:
                return architecture
    model_type = config.get("model_type")
    return next((one for one in _CLASS_PREFIXES.values() if not classes and one == model_type), None)


class HuggingFaceEncoderConfig:
    """One resolution of a folder; `config` is its parsed config.json."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.folder = HuggingFaceFolder(path)
        self.config = self.folder.read_json("config.json")
        architecture = _find_architecture(self.config)
        assert architecture is not None, "ask is_encoder first"
        self.architecture: _Architecture = architecture
        self.defaults = _DEFAULTS[architecture]

    def resolve(self) -> ModelConfig:
        self._check_supported()
        encoder, head = self._encoder(), self._head()
        num_heads = self._size("num_heads", 12, "num_attention_heads")
        hidden_size = self._size("hidden_size", self.defaults.hidden_size)
        if hidden_size % num_heads or hidden_size // num_heads % 2:
            raise self.folder.error(f"hidden_size {hidden_size} does not make {num_heads} heads of an even size")
        return ModelConfig(
            name=self.name,
            path=str(self.folder.path.absolute()),
            format="safetensors",
            architecture=self.architecture,
            vocab_size=self._size("vocab_size", self.defaults.vocab_size),
            hidden_size=hidden_size,
            intermediate_size=self._size("intermediate_size", self.defaults.intermediate_size),
            num_layers=self._size("num_layers", self.defaults.num_layers, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            max_position_embeddings=self._max_positions(encoder),
            rope_theta=self._thetas()[0],
            qkv_bias=self._has_bias("attention_bias"),
            attention_output_bias=self._has_bias("attention_bias"),
            mlp_bias=self._has_bias("mlp_bias"),
            tokenizer_path=str(self.folder.find_tokenizer()),
            weights_dtype=self._dtype(),
            # As sentence-transformers, for a folder without its files.
            **read_embedding(self.folder, pooling="mean", normalize=False, is_causal=False),
            workflows=self._workflows(head),
            encoder=encoder,
            head=head,
            sparse_linear=self._linear_file("sparse_linear"),
            colbert_linear=self._linear_file("colbert_linear"),
        )

    def _check_supported(self) -> None:
        kind = self.config.get("position_embedding_type", "absolute")
        if kind != "absolute":
            raise self.folder.error(f"position_embedding_type {kind!r} is not supported; supported: absolute")
        if self.config.get("is_decoder") or self.config.get("add_cross_attention"):
            raise self.folder.error("an encoder configured as a decoder is not supported")

    def _encoder(self) -> EncoderConfig:
        if self.architecture == "modernbert":
            return self._modern_encoder()
        pad = self.config.get("pad_token_id")
        pad = self.defaults.pad_token_id if pad is None else pad
        return EncoderConfig(
            activation=self._activation("hidden_act"),
            norm_eps=float(self.config.get("layer_norm_eps", 1e-12)),
            num_positions=self._size("max_position_embeddings", self.defaults.max_position_embeddings),
            position_offset=0 if self.architecture == "bert" else int(pad) + 1,
            num_token_types=self._size("num_heads", 2, "type_vocab_size"),
        )

    def _modern_encoder(self) -> EncoderConfig:
        kinds = self.config.get("layer_types")
        every = int(self.config.get("global_attn_every_n_layers", 3))
        if kinds is not None:
            every = next((n for n in range(1, len(kinds) + 1) if kinds == _layer_types(len(kinds), n)), 0)
            if not every:
                raise self.folder.error("config.json: layer_types are not supported in this order")
        return EncoderConfig(
            activation=self._activation("hidden_activation"),
            is_gated=True,
            is_pre_norm=True,
            norm_eps=float(self.config.get("norm_eps", 1e-5)),
            global_every=every,
            local_window=int(self.config.get("local_attention", 128)) // 2,
            local_rope_theta=self._thetas()[1],
        )

    def _thetas(self) -> tuple[float, float]:
        """Of rotary positions where attention is global, and where it is local."""
        by_type = self.config.get("rope_parameters") or {}
        found = []
        for kind, key, default in (
            ("full_attention", "global_rope_theta", 160000.0),
            ("sliding_attention", "local_rope_theta", 10000.0),
        ):
            own = by_type.get(kind) or {}
            if own.get("rope_type", "default") != "default":
                raise self.folder.error(f"rope type {own['rope_type']!r} is not supported for encoders")
            found.append(float(own.get("rope_theta") or self.config.get(key) or default))
        return found[0], found[1]

    def _has_bias(self, key: str) -> bool:
        return self.architecture != "modernbert" or bool(self.config.get(key, False))

    def _max_positions(self, encoder: EncoderConfig) -> int:
        most = self._size("max_position_embeddings", self.defaults.max_position_embeddings)
        return most - encoder.position_offset

    def _activation(self, key: str) -> _Activation:
        name = self.config.get(key, "gelu")
        if name not in _ACTIVATIONS:
            raise self.folder.error(f"{key} {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def _head(self) -> HeadConfig | None:
        if not any(str(cls).endswith("ForSequenceClassification") for cls in self.config.get("architectures") or []):
            return None
        labels = read_labels(self.config)
        pooling: Pooling = "cls"
        if self.architecture == "modernbert":
            named = self.config.get("classifier_pooling", "cls")
            if named not in ("cls", "mean"):
                raise self.folder.error(f"classifier_pooling {named!r} is not supported; supported: cls, mean")
            pooling = "mean" if named == "mean" else "cls"
        return HeadConfig(labels, head_activation(self.folder, self.config, len(labels)), pooling)

    def _workflows(self, head: HeadConfig | None) -> tuple[str, ...]:
        found = ["embed", "hidden_states"]
        found += ["embed_sparse"] * bool(self._linear_file("sparse_linear"))
        found += ["embed_multi"] * bool(self._linear_file("colbert_linear"))
        if head is not None:
            found += ["classify", *(("score", "reward") if len(head.labels) == 1 else ())]
        return tuple(found)

    def _linear_file(self, stem: str) -> str:
        """The file of a linear layer that stands beside the encoder's own weights (bge-m3), or ""."""
        paths = (self.folder.path / f"{stem}{suffix}" for suffix in (".safetensors", ".pt"))
        return next((str(path.absolute()) for path in paths if path.is_file()), "")

    def _size(self, field: str, default: int, key: str | None = None) -> int:
        key = key or field
        value = self.config.get(key, default)
        if (wrong := why_not_a_size(field, value)) is not None:
            raise self.folder.error(f"config.json: {key} {wrong}")
        return int(value)

    def _dtype(self) -> DType:
        """What most weights are; the first tensor may be a table of numbers. Loading says what cannot be read."""
        dtype = first_dtype(self.folder.find_weights())
        return "bfloat16" if dtype == "bfloat16" else "float16" if dtype == "float16" else "float32"


def _layer_types(count: int, every: int) -> list[str]:
    return ["sliding_attention" if index % every else "full_attention" for index in range(count)]
