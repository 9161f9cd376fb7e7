"""Decoders with labels through whole groups: classes, rewards, scores and rankings as transformers computes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from procengine import LLM, InvalidRequestError, ModelError
from procengine.engine_args import EngineArgs
from procengine.models.label_weights import read_label_weights
from procengine.models.weights import open_weights
from procengine.resolve import resolve
from procengine.tokenizer import Tokenizer
from tests.e2e.oracle import one_thread
from tests.e2e.tiny_folders import save_folder
from tests.e2e.tiny_prompts import random_prompts
from tests.tiny_decoders import build_tiny_classifier

_OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64}
_PROMPTS = random_prompts([3, 150, 1, 64, 20], seed=21)  # one of them takes three steps


def logits_of(model: Any, prompt: list[int]) -> NDArray[np.float32]:
    """[labels], or [tokens, labels] of a model whose tokens have them."""
    with one_thread(), torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([prompt])).logits[0].numpy()
    return logits


def sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = torch.tensor(x).sigmoid().numpy()
    return found


@pytest.fixture(scope="module")
def one_label(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any, Path]]:
    model = build_tiny_classifier("llama", "SequenceClassification", 1)
    folder = save_folder(model, tmp_path_factory.mktemp("reward"))
    with LLM(str(folder), **_OPTIONS) as llm:
        yield llm, model, folder


def test_classes_of_texts(tmp_path: Path) -> None:
    labels = {0: "bad", 1: "fair", 2: "good"}
    model = build_tiny_classifier("qwen2", "SequenceClassification", 3, id2label=labels)
    with LLM(str(save_folder(model, tmp_path)), **_OPTIONS) as llm:
        expected = torch.tensor(np.stack([logits_of(model, prompt) for prompt in _PROMPTS]))
        found = llm.classify(_PROMPTS)
        np.testing.assert_allclose([one.scores for one in found], expected.softmax(dim=1), atol=1e-4)
        assert [one.label for one in found] == [labels[i] for i in expected.argmax(dim=1).tolist()]
        raw = llm.classify(_PROMPTS, use_activation=False)
        np.testing.assert_allclose([one.scores for one in raw], expected, atol=1e-4)
        for workflow in ("generate", "score_text", "reward", "token_classify"):
            with pytest.raises(InvalidRequestError, match=f"'{workflow}' is not supported by this model"):
                llm.ask(workflow, [{"prompt": "a"}])


def test_classes_and_rewards_of_tokens(tmp_path: Path) -> None:
    model = build_tiny_classifier("qwen3", "TokenClassification", 2, id2label={0: "outside", 1: "inside"})
    with LLM(str(save_folder(model, tmp_path)), **_OPTIONS) as llm:
        for prompt, found in zip(_PROMPTS, llm.token_classify(_PROMPTS), strict=True):
            expected = torch.tensor(logits_of(model, prompt)).softmax(dim=1)
            np.testing.assert_allclose(found.scores, expected, atol=1e-4)
            assert found.token_labels == [("outside", "inside")[i] for i in expected.argmax(dim=1).tolist()]


def test_rewards_of_tokens(tmp_path: Path) -> None:
    model = build_tiny_classifier("llama", "TokenClassification", 1)
    with LLM(str(save_folder(model, tmp_path)), **_OPTIONS) as llm:
        for prompt, found in zip(_PROMPTS, llm.reward(_PROMPTS), strict=True):
            expected = logits_of(model, prompt)[:, 0]
            np.testing.assert_allclose(found.token_scores, expected, atol=1e-4)
            assert found.score == found.token_scores[-1]


def test_rewards_of_texts_are_logits(one_label: tuple[LLM, Any, Path]) -> None:
    llm, model, _ = one_label
    expected = [logits_of(model, prompt)[0] for prompt in _PROMPTS]
    found = llm.reward(_PROMPTS)
    np.testing.assert_allclose([one.score for one in found], expected, atol=1e-4)
    assert all(one.token_scores == [] for one in found)


def test_two_texts_are_scored_together(one_label: tuple[LLM, Any, Path]) -> None:
    llm, model, folder = one_label
    backend = Tokenizer.load(folder / "tokenizer.json").backend
    documents = ["the mat", "the Paris cat", "日本"]
    expected = np.array([sigmoid(logits_of(model, backend.encode("the cat", one).ids))[0] for one in documents])
    np.testing.assert_allclose([one.score for one in llm.score("the cat", documents)], expected, atol=1e-4)
    assert [one.index for one in llm.rerank("the cat", documents)] == np.argsort(-expected).tolist()


def test_it_embeds_too(one_label: tuple[LLM, Any, Path]) -> None:
    llm, model, _ = one_label
    with one_thread(), torch.inference_mode():
        state = model.model(torch.tensor([_PROMPTS[0]])).last_hidden_state[0, -1]
    (found,) = llm.embed([_PROMPTS[0]], use_tqdm=False)
    np.testing.assert_allclose(found.embedding, state / state.norm(), atol=1e-5)


def test_a_labels_matrix_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_folder(build_tiny_classifier("llama", "SequenceClassification", 2), tmp_path)
    config = resolve(EngineArgs(model=str(folder), num_blocks=8)).model
    assert config.head is not None
    wrong = replace(config.head, labels=("a", "b", "c"))
    with pytest.raises(ModelError, match=r"tensor score\.weight has shape \[2, 64\], expected \[3, 64\]"):
        read_label_weights(replace(config, head=wrong), open_weights(config))
    with pytest.raises(ModelError, match=r"tensor score\.bias is missing"):
        read_label_weights(replace(config, head=replace(config.head, has_bias=True)), open_weights(config))
