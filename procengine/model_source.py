"""Finds a model by name and reads the facts about it: `resolve_model(name, home) -> ModelConfig`.

Owns: what a name may be (folder, .gguf file, alias, hub id), how the keys of a Hugging Face config.json and of a GGUF
file map to `ModelConfig`, and the cache of converted GGUF tokenizers. Never does: read weights, import torch, or
default silently: what the engine cannot run exactly is a ModelError here, not a wrong answer later.
Defaults for absent keys are those of transformers' config classes (HF) and of llama.cpp (GGUF).
"""

from __future__ import annotations

import hashlib
import math
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import msgspec

from procengine import hub
from procengine.config import DType, ModelConfig, RopeScaling
from procengine.errors import ModelError

if TYPE_CHECKING:
    from procengine.gguf_file import GGUFFile

__all__ = ["resolve_model"]

_Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_CACHE_VERSION = 1  # part of the key: raise it when a converted tokenizer or a ModelConfig changes meaning


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
_HF_DEFAULTS: dict[_Architecture, _Defaults] = {
    "llama": _Defaults(32000, 11008, 2048, None, bos_token_id=1, eos_token_id=2),
    "mistral": _Defaults(32000, 14336, 131072, 8, bos_token_id=1, eos_token_id=2),
    "qwen2": _Defaults(151936, 22016, 32768, 32),
    "qwen3": _Defaults(151936, 22016, 32768, 32, head_dim=128),
}
_DEFAULT_WINDOW = 4096  # mistral, and qwen with use_sliding_window
_DEFAULT_RMS_NORM_EPS = 1e-6
_DEFAULT_ROPE_THETA = 10000.0


def resolve_model(name: str, home: Path) -> ModelConfig:
    """Everything the engine must know about `name`: a folder, a .gguf file, an alias or a hub id, tried in this order.

    `home` holds pulled models and converted tokenizers. Raises ModelError saying what was tried or what is wrong.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(name, path, home)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{name}: a model is a folder or a .gguf file, and this is neither")
        return _from_gguf(name, path, home)
    if name in hub.ALIASES or hub.is_hub_id(name):
        return _from_pulled(name, home)
    raise ModelError(
        f"{name!r}: no such model. Tried: a folder or .gguf file at {path.absolute()}; "
        f"the aliases {', '.join(sorted(hub.ALIASES))}; a hub id (org/name)"
    )


def _from_pulled(name: str, home: Path) -> ModelConfig:
    folder = hub.model_dir(name, home)
    if not folder.is_dir():
        raise ModelError(
            f"{name!r}: there is no such folder or file, and it was not pulled to {folder}; run: procengine pull {name}"
        )
    return _from_folder(name, folder, home)


def _from_folder(name: str, folder: Path, home: Path) -> ModelConfig:
    found = sorted(folder.glob("*.gguf"))
    # Folders of GGUF files often carry the config.json of the model that they were made from.
    if (folder / "config.json").is_file() and (any(folder.glob("*.safetensors")) or not found):
        return _checked(_HuggingFaceFolder(name, folder).resolve, folder)
    if len(found) == 1:
        return _from_gguf(name, found[0], home)
    if found:
        raise ModelError(f"{folder} holds several GGUF files, name one: {', '.join(path.name for path in found)}")
    raise ModelError(f"{folder}: there is neither a config.json nor a .gguf file in it")


def _checked(read: Callable[[], ModelConfig], path: Path) -> ModelConfig:
    """What `read` returns, with every field of the type it is declared to have: the files may hold anything."""
    try:
        return msgspec.convert(msgspec.to_builtins(read()), ModelConfig)
    except (msgspec.ValidationError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: a value in its configuration has the wrong type: {error}") from error


# Hugging Face folders


class _HuggingFaceFolder:
    """One resolution of a folder; `config` is its parsed config.json."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.config = _read_json(folder / "config.json")
        self.architecture = self._find_architecture()
        self.defaults = _HF_DEFAULTS[self.architecture]

    def resolve(self) -> ModelConfig:
        self._check_supported()
        weights = self._find_weights()
        tokenizer_config = _read_json(self.folder / "tokenizer_config.json", missing_ok=True)
        bos, eos = (_token_string(tokenizer_config.get(key)) for key in ("bos_token", "eos_token"))
        return ModelConfig(
            name=self.name,
            path=str(self.folder.absolute()),
            format="safetensors",
            architecture=self.architecture,
            **self._sizes(),
            rms_norm_eps=float(self.config.get("rms_norm_eps", _DEFAULT_RMS_NORM_EPS)),
            rope_theta=self._rope_theta(),
            rope_scaling=self._rope_scaling(),
            tie_word_embeddings=bool(self.config.get("tie_word_embeddings", False)),
            qkv_bias=self.architecture == "qwen2" or self._attention_bias(),
            attention_output_bias=self._attention_bias(),
            mlp_bias=self.architecture == "llama" and bool(self.config.get("mlp_bias", False)),
            qk_norm=self.architecture == "qwen3",
            sliding_window=self._sliding_window(),
            bos_token_id=self.config.get("bos_token_id", self.defaults.bos_token_id),
            eos_token_ids=self._eos_token_ids(eos),
            tokenizer_path=str(self._find_tokenizer()),
            chat_template=self._chat_template(tokenizer_config),
            chat_bos_token=bos,
            chat_eos_token=eos,
            weights_dtype=self._dtype(weights),
            pooling=self._pooling(),
        )

    def _find_architecture(self) -> _Architecture:
        classes = self.config.get("architectures") or []
        model_type = self.config.get("model_type")
        for cls in classes:
            if cls in _CLASSES:
                return _CLASSES[cls]
        if not classes and model_type in _HF_DEFAULTS:
            return cast(_Architecture, model_type)
        raise self._error(
            f"the architecture {', '.join(classes) or model_type!r} is not supported; supported: {', '.join(_CLASSES)}"
        )

    def _check_supported(self) -> None:
        activation = self.config.get("hidden_act", "silu")
        if activation != "silu":
            raise self._error(f"hidden_act {activation!r} is not supported; supported: silu")
        quantization = self.config.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise self._error(f"weights quantised by {method!r} are not supported; use unquantised ones or a .gguf")

    def _sizes(self) -> dict[str, Any]:
        hidden_size = self._int("hidden_size", self.defaults.hidden_size)
        num_heads = self._int("num_attention_heads", 32)
        default_head_dim = self.defaults.head_dim or hidden_size // num_heads
        num_kv_heads = self._int("num_key_value_heads", self.defaults.num_kv_heads or num_heads, null=num_heads)
        if num_heads % num_kv_heads:
            raise self._error(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads")
        return {
            "vocab_size": self._int("vocab_size", self.defaults.vocab_size),
            "hidden_size": hidden_size,
            "intermediate_size": self._int("intermediate_size", self.defaults.intermediate_size),
            "num_layers": self._int("num_hidden_layers", 32),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": self._int("head_dim", default_head_dim, null=default_head_dim),
            "max_position_embeddings": self._int("max_position_embeddings", self.defaults.max_position_embeddings),
        }

    def _attention_bias(self) -> bool:
        # Mistral never has biases and Qwen2 always has the three input ones, whatever this key says.
        return self.architecture in ("llama", "qwen3") and bool(self.config.get("attention_bias", False))

    def _int(self, key: str, default: int, null: int | None = None) -> int:
        value = self.config.get(key, default)
        if value is None and null is not None:
            return null
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._error(f"config.json: {key} is {value!r}, not a positive number")
        return value

    def _rope_parameters(self) -> dict[str, Any]:
        # transformers 5 writes rope_parameters; before that, rope_scaling (null for none) with rope_theta beside it.
        parameters = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
            raise self._error(f"config.json: rope parameters by layer type are not supported: {parameters!r}")
        return parameters

    def _rope_theta(self) -> float:
        own = self.config.get("rope_theta")
        theta = self._rope_parameters().get("rope_theta", _DEFAULT_ROPE_THETA if own is None else own)
        return float(theta)

    def _rope_scaling(self) -> RopeScaling:
        parameters = self._rope_parameters()
        rotated = parameters.get("partial_rotary_factor", self.config.get("partial_rotary_factor", 1.0))
        if rotated not in (None, 1.0):
            raise self._error(f"partial_rotary_factor {rotated} is not supported; supported: 1.0")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in _ROPE_KINDS:
            raise self._error(f"rope type {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}")
        if kind == "default":
            return RopeScaling()
        return self._scaled_rope(kind, parameters)

    def _scaled_rope(self, kind: Literal["linear", "llama3", "yarn"], parameters: dict[str, Any]) -> RopeScaling:
        trained = int(self.config.get("max_position_embeddings", self.defaults.max_position_embeddings))
        if kind != "linear":
            trained = self.config.get("original_max_position_embeddings") or int(
                parameters.get("original_max_position_embeddings") or trained
            )
        factor = parameters.get("factor")
        if factor is None and kind == "yarn":
            factor = int(self.config.get("max_position_embeddings", trained)) / trained
        if factor is None:
            raise self._error(f"rope type {kind!r} has no factor")
        return RopeScaling(
            kind=kind,
            factor=float(factor),
            original_max_position_embeddings=int(trained),
            low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
            high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
            beta_fast=float(parameters.get("beta_fast") or 32.0),
            beta_slow=float(parameters.get("beta_slow") or 1.0),
            attention_factor=_yarn_attention_factor(parameters, float(factor)) if kind == "yarn" else None,
            truncate=bool(parameters.get("truncate", True)),
        )

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
        num_layers = self._int("num_hidden_layers", 32)
        kinds = self.config.get("layer_types")
        if kinds is None:  # layers from max_window_layers on slide
            first = int(self.config.get("max_window_layers", 28))
            kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
        if len(set(kinds)) > 1:
            raise self._error("sliding attention in some layers and full attention in others is not supported")
        return bool(kinds) and kinds[0] == "sliding_attention"

    def _find_weights(self) -> Path:
        single, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        if index.is_file():
            shards = sorted({str(shard) for shard in _read_json(index).get("weight_map", {}).values()})
            missing = [shard for shard in shards if not (self.folder / shard).is_file()]
            if missing or not shards:
                raise self._error(f"{index.name} names files that are not there: {', '.join(missing) or 'none at all'}")
            return self.folder / shards[0]
        if single.is_file():
            return single
        pickled = " (pytorch_model.bin is not read: it is a pickle)" if any(self.folder.glob("*.bin")) else ""
        raise self._error(f"there is neither {single.name} nor {index.name}{pickled}")

    def _find_tokenizer(self) -> Path:
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise self._error(
                "there is no tokenizer.json (AutoTokenizer of transformers writes one with save_pretrained)"
            )
        return path.absolute()

    def _eos_token_ids(self, eos_token: str) -> tuple[int, ...]:
        generation = _read_json(self.folder / "generation_config.json", missing_ok=True)
        ids = generation.get("eos_token_id")
        if ids is None:
            ids = self.config.get("eos_token_id", self.defaults.eos_token_id)
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        # A chat model's turns end with its tokenizer's eos, which the config of its base model may not know.
        own = self._added_token_id(eos_token)
        return tuple(dict.fromkeys([*listed, own] if own is not None else listed))

    def _added_token_id(self, content: str) -> int | None:
        if not content:
            return None
        path = self._find_tokenizer()
        try:
            added = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
        except msgspec.DecodeError as error:
            raise ModelError(f"{path}: not a tokenizer.json: {error}") from error
        return next((token.id for token in added if token.content == content), None)

    def _chat_template(self, tokenizer_config: dict[str, Any]) -> str | None:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        return template if isinstance(template, str) else None

    def _dtype(self, weights: Path) -> DType:
        dtype = self.config.get("dtype") or self.config.get("torch_dtype") or _safetensors_dtype(weights)
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise self._error(f"weights of dtype {dtype} are not supported; supported: float32, bfloat16, float16")
        return cast(DType, dtype)

    def _pooling(self) -> Literal["last", "mean"]:
        pooling = _read_json(self.folder / "1_Pooling" / "config.json", missing_ok=True)
        if not pooling:
            return "last"
        modes = {
            key.removeprefix("pooling_mode_") for key, on in pooling.items() if key != "pooling_mode" and on is True
        }
        modes &= {"cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"}
        modes |= {str(pooling["pooling_mode"])} if "pooling_mode" in pooling else set()
        known: dict[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
        if len(modes) != 1 or not modes <= known.keys():
            raise self._error(
                f"1_Pooling: {', '.join(sorted(modes)) or 'no mode'} is not supported; supported: {known}"
            )
        return known[modes.pop()]

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self.folder}: {message}")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float | None:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not (mscale and mscale_all_dim):
        return None
    return _yarn_mscale(factor, float(mscale)) / _yarn_mscale(factor, float(mscale_all_dim))


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _token_string(token: object) -> str:
    if isinstance(token, dict):  # an AddedToken written out
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _safetensors_dtype(path: Path) -> str:
    """dtype of the first tensor; the header is a u64 length and that many bytes of JSON (safetensors' format.md)."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = msgspec.json.decode(file.read(min(length, 100 << 20)), type=dict[str, dict[str, Any]])
    except (struct.error, msgspec.DecodeError) as error:
        raise ModelError(f"{path}: not a safetensors file: {error}") from error
    found = next((str(info["dtype"]) for key, info in header.items() if key != "__metadata__"), "of no tensor")
    return names.get(found, found)


def _read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise ModelError(f"{path}: there is no such file") from error
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


# GGUF files


def _from_gguf(name: str, path: Path, home: Path) -> ModelConfig:
    """Read a GGUF file, or what was kept of it the last time: parsing its vocabulary costs a second, the cache 1 ms."""
    path = path.absolute()
    folder = home / "tokenizers" / _cache_key(path)
    cached = _read_cached(folder)
    if cached is None:
        cached = _convert(path, folder)
    return msgspec.structs.replace(cached, name=name, tokenizer_path=str(folder.absolute() / "tokenizer.json"))


def _cache_key(path: Path) -> str:
    stat = path.stat()
    facts = f"{_CACHE_VERSION}|{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    return hashlib.sha256(facts.encode()).hexdigest()[:24]


def _read_cached(folder: Path) -> ModelConfig | None:
    try:
        cached = msgspec.json.decode((folder / "model.json").read_bytes(), type=ModelConfig)
    except (OSError, msgspec.DecodeError):  # absent, or written by another version: made anew
        return None
    return cached if (folder / "tokenizer.json").is_file() else None


def _convert(path: Path, folder: Path) -> ModelConfig:
    # Imported here because a warm start needs neither.
    from procengine.gguf_file import GGUFFile
    from procengine.gguf_tokenizer import build_tokenizer

    file = GGUFFile(path)
    config = _checked(_GGUFFacts(file).resolve, path)
    tokenizer = build_tokenizer(file.metadata, str(path)).to_str()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(folder / "tokenizer.json", tokenizer.encode())
        _write_atomically(folder / "model.json", msgspec.json.encode(config))  # last: it says that both are there
    except OSError as error:
        raise ModelError(f"{folder}: the converted tokenizer cannot be written there: {error}") from error
    return config


def _write_atomically(path: Path, data: bytes) -> None:
    """Others see the old file or the whole new one, also when several processes write it at once."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(data)
            file.flush()
            temporary.chmod(0o644)  # temporary files are private, the cache of a shared home need not be
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


class _GGUFFacts:
    """One resolution of a GGUF file; keys without a prefix are those of its architecture (`llama.*`)."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = self._find_architecture()

    def resolve(self) -> ModelConfig:
        from procengine.gguf_tokenizer import end_token_ids, token_text

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
        )

    def _find_architecture(self) -> _Architecture:
        found = self.file.metadata.get("general.architecture")
        if found not in ("llama", "qwen2", "qwen3"):  # Mistral's files say llama
            raise self._error(f"general.architecture {found!r} is not supported; supported: llama, qwen2, qwen3")
        if self.file.metadata.get(f"{found}.expert_count"):
            raise self._error("mixture-of-experts models are not supported")
        return cast(_Architecture, found)

    def _sizes(self) -> dict[str, Any]:
        hidden_size, num_heads = self._int("embedding_length"), self._int("attention.head_count")
        head_dim = self._int("attention.key_length", hidden_size // num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._int(key, head_dim) != head_dim:
                raise self._error(f"{key} is {self._int(key)}, which differs from the head size {head_dim}")
        return {
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden_size,
            "intermediate_size": self._int("feed_forward_length"),
            "num_layers": self._int("block_count"),
            "num_heads": num_heads,
            "num_kv_heads": self._int("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._int("context_length"),
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
        trained = self._int("rope.scaling.original_context_length", self._int("context_length"))
        scale = float(self._value("rope.scaling.attn_factor", 1.0))
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_max_position_embeddings=trained,
            beta_fast=float(self._value("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self._value("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=None if scale == 1.0 else scale * _yarn_mscale(factor, 1.0),
        )

    def _llama3_scaling(self) -> RopeScaling:
        """Llama 3.1's scaling is not in the metadata but as a tensor of divisors of the frequencies.

        Its longest wavelengths are divided by `factor`; the other numbers are Llama 3's own, and are checked.
        """
        import numpy as np

        stored = self.file.tensor_bytes("rope_freqs.weight").view(np.float32)
        scaling = RopeScaling(kind="llama3", factor=float(stored[-1]), original_max_position_embeddings=8192)
        head_dim = self._int("rope.dimension_count", 2 * len(stored))
        theta = float(self._value("rope.freq_base", _DEFAULT_ROPE_THETA))
        if not np.allclose(stored, _llama3_divisors(scaling, theta, head_dim), rtol=1e-3):
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

    def _int(self, key: str, *default: int) -> int:
        value = self._value(key, *default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._error(f"{self.architecture}.{key} is {value!r}, not one positive number")
        return value

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self.file.path}: {message}")


def _llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> Sequence[float]:
    """By how much Llama 3.1 divides each of the head_dim/2 frequencies (the formula of its reference code)."""
    trained = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    divisors: list[float] = []
    for index in range(0, head_dim, 2):
        turns = trained * theta ** (-index / head_dim) / (2 * math.pi)  # rotations within the trained context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1.0 / ((1.0 - smooth) / scaling.factor + smooth))
    return divisors
