"""resolve_model: what a name may be, and the facts read from Hugging Face folders and GGUF files."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from procengine.config import ModelConfig, RopeScaling
from procengine.errors import ModelError
from procengine.gguf_tokenizer import build_tokenizer
from procengine.model_source import resolve_model
from procengine.tokenizer import Tokenizer
from tests import tiny_tokenizers

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", **SIZES}


def write_folder(folder: Path, config: dict[str, Any], **files: dict[str, Any] | str) -> Path:
    """A model folder with an (empty) safetensors file; `files` are further files, `__` standing for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    tiny_tokenizers.byte_level().backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def resolve(tmp_path: Path, config: dict[str, Any], **files: dict[str, Any] | str) -> ModelConfig:
    return resolve_model(str(write_folder(tmp_path / "model", config, **files)), tmp_path / "home")


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


# Hugging Face folders


def test_folder(tmp_path: Path) -> None:
    config = resolve(
        tmp_path, {**LLAMA, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True}
    )
    folder = tmp_path / "model"
    assert config == ModelConfig(
        name=str(folder),
        path=str(folder),
        format="safetensors",
        architecture="llama",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_theta=5e5,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        tokenizer_path=str(folder / "tokenizer.json"),
        weights_dtype="float32",
    )


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    "sizes", [{}, SIZES, {"head_dim": 24}, {"num_key_value_heads": 8}, {"tie_word_embeddings": True}]
)
@pytest.mark.parametrize("style", ["saved", "bare"])
def test_defaults_are_those_of_transformers(tmp_path: Path, name: str, sizes: dict[str, Any], style: str) -> None:
    import transformers

    theirs = getattr(transformers, f"{name}Config")(**sizes)
    head = {"architectures": [f"{name}ForCausalLM"], "dtype": "bfloat16"}
    # As transformers writes it, or with nothing but what was given.
    ours = resolve(tmp_path, {**theirs.to_dict(), **head} if style == "saved" else {**sizes, **head})
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.qkv_bias == (name == "Qwen2") and ours.qk_norm == (name == "Qwen3")


LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("rope", "theta", "expected"),
    [
        ({}, 1e4, RopeScaling()),
        ({"rope_scaling": None, "rope_theta": 7.0}, 7.0, RopeScaling()),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, 9.0, RopeScaling()),
        ({"rope_parameters": {"rope_theta": 9.0}, "rope_theta": 5.0}, 9.0, RopeScaling()),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, RopeScaling("linear", 2.0, 512)),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}, "rope_theta": 5e5},
            5e5,
            RopeScaling("llama3", 8.0, 128),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
            5e5,
            RopeScaling("llama3", 8.0, 128),
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 1e4, RopeScaling("yarn", 4.0, 512)),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "beta_fast": 16,
                    "attention_factor": 1.5,
                    "truncate": False,
                }
            },
            1e4,
            RopeScaling("yarn", 4.0, 128, beta_fast=16.0, attention_factor=1.5, truncate=False),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
            1e4,
            RopeScaling("yarn", 4.0, 512, attention_factor=1.0),
        ),
    ],
)
def test_rope_forms_old_and_new(tmp_path: Path, rope: dict[str, Any], theta: float, expected: RopeScaling) -> None:
    config = resolve(tmp_path, {**LLAMA, **rope})
    assert (config.rope_theta, config.rope_scaling) == (theta, expected)


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 128}, 128),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "llama", "sliding_window": 128}, None),
        ({"model_type": "qwen2", "sliding_window": 128}, None),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, None),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, 128),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 2,
            },
            64,
        ),
    ],
)
def test_sliding_window(tmp_path: Path, keys: dict[str, Any], window: int | None) -> None:
    assert resolve(tmp_path, {**without(LLAMA, "architectures"), **keys}).sliding_window == window


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*not supported.*LlamaForCausalLM"),
        ({**without(LLAMA, "architectures"), "model_type": "phi3"}, "phi3.*not supported"),
        ({**LLAMA, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope.*supported: default"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*not supported"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "has no factor"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({**LLAMA, "hidden_size": "big"}, "hidden_size is 'big'"),
        ({**LLAMA, "num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({**LLAMA, "dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({**LLAMA, "rms_norm_eps": "small"}, "wrong type.*small"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": []}}, "wrong type"),
        ({**LLAMA, "eos_token_id": ["</s>"]}, r"wrong type.*eos_token_ids"),
        ({**LLAMA, "sliding_window": "all", "architectures": ["MistralForCausalLM"]}, r"wrong type.*sliding_window"),
        (
            {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1},
            "sliding attention in some layers",
        ),
    ],
)
def test_what_cannot_be_run_exactly_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"model: .*{message}"):
        resolve(tmp_path, config)


def test_end_tokens_of_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    end = tiny_tokenizers.byte_level().token_to_id("<|end|>")
    start = tiny_tokenizers.byte_level().token_to_id("<|start|>")
    assert resolve(tmp_path, {**LLAMA, "eos_token_id": 5}).eos_token_ids == (5,)
    assert resolve(tmp_path, {**LLAMA, "eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    files: dict[str, Any] = {"generation_config__json": {"eos_token_id": [7, 8]}}
    assert resolve(tmp_path, {**LLAMA, "eos_token_id": 5}, **files).eos_token_ids == (7, 8)
    files["tokenizer_config__json"] = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|start|>"}
    config = resolve(tmp_path, {**LLAMA, "bos_token_id": start}, **files)
    assert config.eos_token_ids == (7, 8, end)
    assert (config.chat_bos_token, config.chat_eos_token, config.bos_token_id) == ("<|start|>", "<|end|>", start)


def test_chat_template_sources(tmp_path: Path) -> None:
    assert resolve(tmp_path, LLAMA).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert resolve(tmp_path, LLAMA, tokenizer_config__json={"chat_template": named}).chat_template == "D"
    assert resolve(tmp_path, LLAMA, tokenizer_config__json={"chat_template": "C"}).chat_template == "C"
    assert resolve(tmp_path, LLAMA, chat_template__jinja="J\n").chat_template == "J\n"


def test_sharded_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        resolve_model(str(folder), tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"not there: model-2\.safetensors"):
        resolve_model(str(folder), tmp_path)
    (folder / "model-2.safetensors").touch()
    assert resolve_model(str(folder), tmp_path).num_layers == 2


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickle"):
        resolve_model(str(folder), tmp_path)


@pytest.mark.parametrize(("code", "dtype"), [("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16")])
def test_dtype_from_the_weights_when_the_config_has_none(tmp_path: Path, code: str, dtype: str) -> None:
    folder = write_folder(tmp_path / "m", without(LLAMA, "dtype"))
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": code, "shape": [0], "data_offsets": [0, 0]}})
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    assert resolve_model(str(folder), tmp_path).weights_dtype == dtype
    (folder / "model.safetensors").write_bytes(b"\xff" * 30)
    with pytest.raises(ModelError, match="not a safetensors file"):
        resolve_model(str(folder), tmp_path)


def test_emb_02_pooling_comes_from_the_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA)
    assert resolve_model(str(folder), tmp_path).pooling == "last"
    (folder / "1_Pooling").mkdir()
    for content, expected in [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "include_prompt": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ]:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
        assert resolve_model(str(folder), tmp_path).pooling == expected
    for content in ({"pooling_mode_cls_token": True}, {"pooling_mode": "max"}, {"embedding_dimension": 64}):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
        with pytest.raises(ModelError, match="1_Pooling"):
            resolve_model(str(folder), tmp_path)


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        resolve_model(str(folder), tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        resolve_model(str(folder), tmp_path)


# Names


def test_names_that_lead_nowhere_list_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'nope'.*folder or \.gguf.*smollm2-135m.*org/name"):
        resolve_model("nope", tmp_path)
    for name in ("smollm2-135m", "org/model"):
        with pytest.raises(ModelError, match=f"procengine pull {name}"):
            resolve_model(name, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf"):
        resolve_model(str(tmp_path / "empty"), tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"folder or a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"), tmp_path)


def test_folder_of_one_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write_gguf(tmp_path / "m" / "a.gguf")
    assert resolve_model(str(tmp_path / "m"), tmp_path).format == "gguf"
    (tmp_path / "m" / "config.json").write_text("{}")  # beside a GGUF and no weights of its own, it says nothing
    assert resolve_model(str(tmp_path / "m"), tmp_path).format == "gguf"
    write_gguf(tmp_path / "m" / "b.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files.*a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path / "m"), tmp_path)


def test_null_key_value_heads_means_one_for_each_head(tmp_path: Path) -> None:
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        keys = {"model_type": model_type, "num_key_value_heads": None}
        assert resolve(tmp_path, {**without(LLAMA, "architectures"), **keys}).num_kv_heads == 4


def test_pulled_models_are_found_by_their_names(tmp_path: Path) -> None:
    write_folder(tmp_path / "models" / "org--model", LLAMA)
    config = resolve_model("org/model", tmp_path)
    assert config.name == "org/model" and config.path == str(tmp_path / "models" / "org--model")
    (tmp_path / "models" / "smollm2-135m").mkdir()
    write_gguf(tmp_path / "models" / "smollm2-135m" / "any.gguf")
    config = resolve_model("smollm2-135m", tmp_path)
    assert config.name == "smollm2-135m" and config.path.endswith("any.gguf")


# GGUF files

TENSORS = {"token_embd.weight": (300, 64), "output.weight": (300, 64)}


def write_gguf(path: Path, architecture: str = "llama", tensors: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A GGUF file with the header of a small model; keys override, None leaves one out, `__` stands for a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
        "attention__head_count": 4, "attention__head_count_kv": 2, "attention__layer_norm_rms_epsilon": 1e-5, **keys,
    }  # fmt: skip
    for key, value in values.items():
        if value is not None:
            add_key(writer, f"{architecture}.{key.replace('__', '.')}", value)
    for key, value in tiny_tokenizers.byte_level_metadata(tiny_tokenizers.WORDS, pre="smollm").items():
        add_key(writer, key, value)
    for name, shape in (TENSORS if tensors is None else tensors).items():
        data = shape if isinstance(shape, np.ndarray) else np.zeros(shape, dtype=np.float32)
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            if value:
                writer.add_array(key, value)


def test_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    config = resolve_model(str(path), tmp_path)
    tokens = tiny_tokenizers.byte_level_metadata(tiny_tokenizers.WORDS)
    assert config == ModelConfig(
        name=str(path),
        path=str(path),
        format="gguf",
        architecture="llama",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=float(np.float32(1e-5)),
        bos_token_id=tokens["tokenizer.ggml.bos_token_id"],
        eos_token_ids=(tokens["tokenizer.ggml.eos_token_id"],),
        tokenizer_path=config.tokenizer_path,
        chat_bos_token="<|start|>",
        chat_eos_token="<|end|>",
        weights_dtype="float32",
    )
    assert Tokenizer.load(config.tokenizer_path).encode("cat 12") == tiny_tokenizers_smollm().encode("cat 12")


def tiny_tokenizers_smollm() -> Tokenizer:
    metadata = tiny_tokenizers.byte_level_metadata(tiny_tokenizers.WORDS, pre="smollm")
    return Tokenizer(build_tokenizer(metadata, "tiny"))


def llama3_factors(factor: float, head_dim: int = 16, theta: float = 5e5) -> npt.NDArray[np.float32]:
    """What transformers' llama3 rope divides the plain frequencies by: what GGUF files hold as rope_freqs.weight."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": theta, **LLAMA3_ROPE, "factor": factor,
            "original_max_position_embeddings": 8192}  # fmt: skip
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=64 // head_dim, max_position_embeddings=131072, rope_parameters=rope
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.asarray(plain / scaled.numpy(), dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_gguf_llama3_rope_is_recovered_from_its_tensor(tmp_path: Path, factor: float) -> None:
    divisors = llama3_factors(factor)
    tensors = {**TENSORS, "rope_freqs.weight": divisors}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, rope__freq_base=5e5)
    assert resolve_model(str(path), tmp_path).rope_scaling == RopeScaling("llama3", factor, 8192)
    divisors[1] *= 1.5
    path = write_gguf(tmp_path / "odd.gguf", tensors=tensors, rope__freq_base=5e5)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        resolve_model(str(path), tmp_path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope__scaling__type": "none"}, RopeScaling()),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, RopeScaling("linear", 2.0, 512)),
        ({"rope__scale_linear": 4.0}, RopeScaling("linear", 4.0)),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 128,
            },
            RopeScaling("yarn", 4.0, 128),
        ),
    ],
)
def test_gguf_rope_scaling(tmp_path: Path, keys: dict[str, Any], expected: RopeScaling) -> None:
    assert resolve_model(str(write_gguf(tmp_path / "m.gguf", **keys)), tmp_path).rope_scaling == expected


def test_gguf_parts_are_known_by_their_tensors(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": np.zeros((320, 64), dtype=np.float16),
        "blk.0.attn_q.bias": (64,),
        "blk.0.attn_q_norm.weight": (32,),
    }
    keys = {"attention__key_length": 32, "attention__value_length": 32, "attention__head_count_kv": None}
    path = write_gguf(tmp_path / "m.gguf", "qwen3", tensors, **keys)
    config = resolve_model(str(path), tmp_path)
    assert config.tie_word_embeddings and config.qkv_bias and config.qk_norm and not config.attention_output_bias
    assert (config.architecture, config.head_dim, config.num_kv_heads) == ("qwen3", 32, 4)
    assert (config.vocab_size, config.weights_dtype) == (320, "float16")


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("gemma", {}, "'gemma' is not supported; supported: llama"),
        ("llama", {"expert_count": 8}, "mixture-of-experts"),
        ("llama", {"block_count": None}, r"llama\.block_count is missing"),
        ("llama", {"attention__head_count": [4, 4]}, r"llama\.attention\.head_count is"),
        ("llama", {"rope__dimension_count": 8}, "rope.dimension_count is 8"),
        ("llama", {"rope__scaling__type": "longrope"}, "longrope.*not supported"),
    ],
)
def test_gguf_that_cannot_be_run_is_refused(
    tmp_path: Path, architecture: str, keys: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture, **keys)
    with pytest.raises(ModelError, match=rf"m\.gguf: .*{message}"):
        resolve_model(str(path), tmp_path / "home")
    assert not (tmp_path / "home").exists()  # nothing is kept of a model that was refused


def test_gguf_conversion_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    first = resolve_model(str(path), tmp_path / "home")
    with monkeypatch.context() as patch:
        patch.setattr("procengine.gguf_file.GGUFFile", None)  # a warm start does not open the file
        assert resolve_model(str(path), tmp_path / "home") == first
        patch.chdir(tmp_path)
        assert resolve_model("m.gguf", tmp_path / "home").name == "m.gguf"
    os.utime(path, ns=(1, 1))
    second = resolve_model(str(path), tmp_path / "home")
    assert second.tokenizer_path != first.tokenizer_path


@pytest.mark.parametrize("broken", ["model.json", "tokenizer.json"])
def test_gguf_cache_mends_itself(tmp_path: Path, broken: str) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    first = resolve_model(str(path), tmp_path / "home")
    file = Path(first.tokenizer_path).parent / broken
    file.unlink() if broken == "tokenizer.json" else file.write_text('{"of": "another version"}')
    assert resolve_model(str(path), tmp_path / "home") == first
    assert file.is_file()


def _resolve_in_child(path: str, home: str, queue: multiprocessing.Queue[str]) -> None:
    config = resolve_model(path, Path(home))
    queue.put(json.dumps([config.tokenizer_path, Tokenizer.load(config.tokenizer_path).encode("cat 12")]))


def test_gguf_cache_is_safe_with_several_processes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[str] = context.Queue()
    children = [
        context.Process(target=_resolve_in_child, args=(str(path), str(tmp_path / "h"), queue)) for _ in range(3)
    ]
    for child in children:
        child.start()
    answers = {queue.get(timeout=30) for _ in children}
    for child in children:
        child.join(timeout=30)
    assert len(answers) == 1
    folder = Path(json.loads(answers.pop())[0]).parent
    assert sorted(file.name for file in folder.iterdir()) == ["model.json", "tokenizer.json"]  # nothing half-written


def test_unwritable_home_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "home").write_text("a file, not a folder")
    with pytest.raises(ModelError, match="cannot be written there"):
        resolve_model(str(path), tmp_path / "home")


@pytest.mark.model
def test_real_gguf(smollm2_gguf: Path, tmp_path: Path) -> None:
    config = resolve_model(str(smollm2_gguf), tmp_path)
    assert (config.architecture, config.num_layers, config.hidden_size, config.head_dim) == ("llama", 30, 576, 64)
    assert (config.num_heads, config.num_kv_heads, config.vocab_size) == (9, 3, 49152)
    assert config.rope_theta == 100000.0 and config.tie_word_embeddings and config.max_position_embeddings == 8192
    assert config.eos_token_ids == (2,) and config.bos_token_id == 1
    tokenizer = Tokenizer.load(config.tokenizer_path)
    texts = ["The capital of France is", "Here is the English alphabet: ABC", "日本語" * 4, "cat dog cat dog cat dog"]
    assert [len(tokenizer.encode(text)) for text in texts] == [5, 7, 24, 6]
    assert tokenizer.vocab_size == 49152 and tokenizer.special_token_ids == frozenset(range(17))
