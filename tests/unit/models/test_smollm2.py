"""The real SmolLM2-135M: its GGUF file against transformers' own reading of it, saved as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from procengine.config import ModelConfig
from procengine.model_source import resolve_model
from procengine.models.decoder import Decoder
from procengine.models.llama import LlamaModel
from procengine.models.loader import load_model, read_into
from procengine.models.weights import open_weights
from procengine.tokenizer import Tokenizer
from tests.model_configs import SMOLLM2, replace
from tests.unit.models.paged_forward import PagedForward, forward_whole

pytestmark = pytest.mark.model

PROMPTS = {
    "The capital of France is": [7042, 30, 198, 198],
    "Here is the English alphabet: ABC": [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71],
    "日本語" * 4: [23274, 115, 40993, 179, 120, 248] * 2,
    "cat dog cat dog cat dog": [2767] * 8,
}


@pytest.fixture(scope="module")
def config(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return resolve_model(str(smollm2_gguf), tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def copy_config(config: ModelConfig, smollm2_oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("copy")
    parameters = {name: parameter.detach() for name, parameter in smollm2_oracle.named_parameters()}
    save_file(parameters, folder / "model.safetensors")
    return replace(config, format="safetensors", path=str(folder))


@pytest.fixture(scope="module")
def model(config: ModelConfig) -> LlamaModel:
    model = load_model(config, torch.float32, "cpu", progress=False)
    assert isinstance(model, LlamaModel)
    return model


@pytest.fixture(scope="module")
def tokenizer(config: ModelConfig) -> Tokenizer:
    return Tokenizer.load(config.tokenizer_path)


def greedy(model: Decoder, prompt: list[int], max_tokens: int) -> list[int]:
    sequence = prompt + [0] * max_tokens
    run = PagedForward(model, [sequence], block_size=16)
    logits = run.step({0: len(prompt)})[0]
    for position in range(len(prompt), len(sequence)):
        sequence[position] = int(logits[-1].argmax())
        if position + 1 < len(sequence):
            logits = run.step({0: 1})[0]
    return sequence[len(prompt) :]


def perplexity(logits: Tensor, token_ids: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:])).exp())


def test_the_file_states_what_the_tests_assume(config: ModelConfig) -> None:
    for name in ("architecture", "vocab_size", "hidden_size", "num_layers", "num_kv_heads", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(SMOLLM2, name)


def test_lod_01_q_and_k_rows_are_those_of_the_safetensors_copy(config: ModelConfig, copy_config: ModelConfig) -> None:
    source, copy = open_weights(config), open_weights(copy_config)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        full_name = f"model.layers.0.{name}.weight"
        found, expected = torch.empty(source.shape(full_name)), torch.empty(copy.shape(full_name))
        read_into(source, full_name, found)
        read_into(copy, full_name, expected)
        assert float(torch.cosine_similarity(found, expected).min()) > 0.99


@pytest.mark.parametrize("prompt", PROMPTS)
def test_lod_01_greedy_continuations_from_the_gguf_file(prompt: str, model: LlamaModel, tokenizer: Tokenizer) -> None:
    expected = PROMPTS[prompt]
    assert greedy(model, tokenizer.encode(prompt), len(expected)) == expected


def test_lod_01_a_long_text_is_as_likely_as_with_the_safetensors_copy(
    model: LlamaModel, smollm2_oracle: Any, copy_config: ModelConfig, tokenizer: Tokenizer
) -> None:
    copy = load_model(copy_config, torch.float32, "cpu", progress=False)
    text = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")[:2048]
    token_ids = tokenizer.encode(text)
    assert len(token_ids) >= 200
    found, expected = forward_whole(model, token_ids), forward_whole(copy, token_ids)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    with torch.inference_mode():
        torch.testing.assert_close(found, smollm2_oracle(torch.tensor([token_ids])).logits[0], atol=1e-2, rtol=1e-2)
    assert perplexity(found, token_ids) == pytest.approx(perplexity(expected, token_ids), rel=0.01)
    for prompt, continuation in PROMPTS.items():
        assert greedy(copy, tokenizer.encode(prompt), len(continuation)) == continuation


def test_lod_02_the_tied_head_is_the_embedding(model: LlamaModel, config: ModelConfig) -> None:
    name = "model.embed_tokens.weight"
    source = open_weights(config)
    assert "lm_head.weight" not in source.names
    embedding = torch.empty(source.shape(name))
    read_into(source, name, embedding)
    torch.testing.assert_close(model.compute_logits(torch.eye(576)[:5]), embedding.T[:5])


def test_bfloat16_keeps_the_greedy_continuations(config: ModelConfig, tokenizer: Tokenizer) -> None:
    model = load_model(config, torch.bfloat16, "cpu", progress=False)
    for prompt, expected in PROMPTS.items():
        assert greedy(model, tokenizer.encode(prompt), len(expected)) == expected
