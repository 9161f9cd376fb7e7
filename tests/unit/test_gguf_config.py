"""GGUFConfig: the facts read from a GGUF file's metadata and tensors, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from procengine.config import ModelConfig, RopeScaling
from procengine.errors import ModelError
from procengine.gguf_tokenizer import build_tokenizer
from procengine.model_source import resolve_model
from procengine.tokenizer import Tokenizer
from tests import tiny_tokenizers
from tests.model_files import LLAMA3_ROPE, TENSORS, write_gguf


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
