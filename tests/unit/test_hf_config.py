"""HuggingFaceConfig: the facts read from config.json, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from procengine.config import ModelConfig
from procengine.errors import ModelError
from tests import tiny_tokenizers
from tests.model_files import LLAMA, SIZES, resolve, without


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


@pytest.mark.parametrize(
    "name", ["Phi3", "Olmo2", "Granite", "SmolLM3", "Gemma2", "Gemma3", "Mixtral", "Qwen2Moe", "Qwen3Moe"]
)
@pytest.mark.parametrize("style", ["saved", "bare"])
def test_defaults_of_other_families_too(tmp_path: Path, name: str, style: str) -> None:
    import transformers

    theirs = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")()
    head = {"architectures": [f"{name}ForCausalLM"], "dtype": "bfloat16"}
    ours = resolve(tmp_path, {**theirs.to_dict(), **head} if style == "saved" else head)
    for own, other in (
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "intermediate_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("max_position_embeddings", "max_position_embeddings"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("tie_word_embeddings", "tie_word_embeddings"),
        ("bos_token_id", "bos_token_id"),
    ):
        assert getattr(ours, own) == getattr(theirs, other), own
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    kinds = getattr(theirs, "layer_types", None) or []
    windows = (
        [layer for layer, kind in enumerate(kinds) if kind == "full_attention"] if "sliding_attention" in kinds else []
    )
    assert ours.decoder.global_layers == tuple(windows)
    assert ours.sliding_window == (theirs.sliding_window if windows else None)
    experts = ours.decoder.experts
    assert (experts is None) == (not hasattr(theirs, "num_experts_per_tok"))
    if experts is not None:
        assert experts.num_experts == theirs.num_experts
        assert experts.num_experts_per_token == theirs.num_experts_per_tok
        assert experts.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert experts.layers == tuple(range(ours.num_layers))
        assert experts.shared_intermediate_size == getattr(theirs, "shared_expert_intermediate_size", 0)


def test_null_key_value_heads_means_one_for_each_head(tmp_path: Path) -> None:
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        keys = {"model_type": model_type, "num_key_value_heads": None}
        assert resolve(tmp_path, {**without(LLAMA, "architectures"), **keys}).num_kv_heads == 4


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
    ("keys", "layers"),
    [
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, (0,)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, ()),
        ({"model_type": "qwen2", "max_window_layers": 1}, ()),
        ({"model_type": "gemma2"}, (1,)),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"]}, (0,)),
    ],
)
def test_layers_without_the_window(tmp_path: Path, keys: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert resolve(tmp_path, {**without(LLAMA, "architectures"), **keys}).decoder.global_layers == layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "architectures": ["T5ForConditionalGeneration"]}, "T5For.*not supported.*LlamaForCausalLM"),
        ({**without(LLAMA, "architectures"), "model_type": "bloom"}, "bloom.*not supported"),
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
            {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "layer_types": ["chunked_attention"] * 2},
            "layer_types.*chunked_attention.*not supported",
        ),
        ({**LLAMA, "architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "bidirectional"),
        ({**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 0}, "num_local_experts is 0"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"model: .*{message}"):
        resolve(tmp_path, config)


def test_other_decoders_are_for_transformers_if_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**LLAMA, "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"}
    config = resolve(tmp_path, other)
    assert (config.architecture, config.num_layers, config.head_dim) == ("transformers", 2, 16)
    with pytest.raises(ModelError, match="hidden_size is 0"):
        resolve(tmp_path, without(other, "hidden_size"))
    monkeypatch.setattr("procengine.hf_config.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"'GemmaForCausalLM' is not supported.*extra `transformers`"):
        resolve(tmp_path, other)


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


@pytest.mark.parametrize(("cls", "name"), [("MistralModel", "mistral"), ("Qwen3Model", "qwen3")])
def test_a_decoder_without_a_head_embeds_and_does_not_generate(tmp_path: Path, cls: str, name: str) -> None:
    config = resolve(tmp_path, LLAMA | {"architectures": [cls], "tie_word_embeddings": False})
    assert (config.architecture, config.workflows) == (name, ("embed", "hidden_states"))
    assert config.tie_word_embeddings  # so that nobody looks for the head
    assert resolve(tmp_path, LLAMA).workflows == ("generate", "embed", "hidden_states", "score_text")
