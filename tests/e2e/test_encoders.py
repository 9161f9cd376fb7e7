"""Encoders through whole groups: vectors, labels, scores and hidden states as transformers computes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from procengine import LLM, InvalidRequestError
from tests.tiny_encoders import build_tiny_encoder, save_encoder, tiny_wordpiece

TEXTS = ["the cat sat on the mat", "hello world", "a", "cat " * 60]
_OPTIONS: dict[str, Any] = {"kernels": "torch", "threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 160}


def encode(text: str, pair: str | None = None) -> dict[str, torch.Tensor]:
    found = tiny_wordpiece().encode(text, pair)
    return {
        "input_ids": torch.tensor([found.ids]),
        "token_type_ids": torch.tensor([found.type_ids]),
    }


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    labels = {0: "bad", 1: "fair", 2: "good"}
    model = build_tiny_encoder("bert", "ForSequenceClassification", num_labels=3, id2label=labels)
    with LLM(str(save_encoder(model, tmp_path_factory.mktemp("labels"))), **_OPTIONS) as llm:
        yield llm, model


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    model = build_tiny_encoder("bert", "ForSequenceClassification", num_labels=1)
    with LLM(str(save_encoder(model, tmp_path_factory.mktemp("cross"))), **_OPTIONS) as llm:
        yield llm, model


def test_classify_gives_the_models_labels_and_probabilities(labelled: tuple[LLM, Any]) -> None:
    llm, model = labelled
    with torch.inference_mode():
        logits = torch.cat([model(**encode(text)).logits for text in TEXTS])
    found = llm.classify(TEXTS)
    np.testing.assert_allclose([one.scores for one in found], logits.softmax(dim=1), atol=1e-4)
    assert [one.label for one in found] == [("bad", "fair", "good")[i] for i in logits.argmax(dim=1)]
    raw = llm.classify(TEXTS, use_activation=False)
    np.testing.assert_allclose([one.scores for one in raw], logits, atol=1e-3)


def test_a_model_with_labels_embeds_too_and_gives_hidden_states(labelled: tuple[LLM, Any]) -> None:
    llm, model = labelled
    with torch.inference_mode():
        states = [model(**encode(text), output_hidden_states=True).hidden_states for text in TEXTS]
    embedded = llm.embed(TEXTS, use_tqdm=False)  # mean, not normalised: its folder says nothing
    np.testing.assert_allclose([one.embedding for one in embedded], [s[-1][0].mean(0) for s in states], atol=1e-4)
    for layer, tokens, of in [(1, "all", slice(None)), (-1, "last", slice(-1, None)), (0, "first", slice(1))]:
        found = llm.hidden_states(TEXTS, layer=layer, tokens=tokens)
        for one, expected in zip(found, states, strict=True):
            states_of = np.frombuffer(one.data, "<f4").reshape(-1, 48)
            np.testing.assert_allclose(states_of, expected[layer][0][of], atol=1e-4)


def test_what_a_model_does_not_do_is_refused_by_name(labelled: tuple[LLM, Any]) -> None:
    llm, _ = labelled
    with pytest.raises(InvalidRequestError, match="'score' is not supported by this model"):
        llm.score("a", "b")
    with pytest.raises(InvalidRequestError, match="'generate' is not supported by this model"):
        llm.generate("a", use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="layer: must be -4 to 3, got 4"):
        llm.hidden_states("a", layer=4)
    with pytest.raises(InvalidRequestError, match="dimensions: must be 1 to 48"):
        llm.embed("a", dimensions=49, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="context limit"):
        llm.embed("cat " * 400, use_tqdm=False)
    assert len(llm.embed("cat " * 400, truncate_prompt_tokens=-1, use_tqdm=False)[0].prompt_token_ids) == 160


def expected_scores(model: Any, pairs: list[tuple[str, str]]) -> NDArray[np.float32]:
    with torch.inference_mode():
        scores: NDArray[np.float32] = torch.cat([model(**encode(*pair)).logits[0] for pair in pairs]).sigmoid().numpy()
    return scores


def test_a_cross_encoder_reads_both_texts_together(cross_encoder: tuple[LLM, Any]) -> None:
    llm, model = cross_encoder
    documents = ["the mat", "hello cat", "world world world"]
    expected = expected_scores(model, [("the cat", document) for document in documents])
    found = llm.score("the cat", documents)
    np.testing.assert_allclose([one.score for one in found], expected, atol=1e-4)
    ranked = llm.rerank("the cat", documents, top_n=2)
    assert [one.index for one in ranked] == np.argsort(-expected)[:2].tolist()
    assert [one.document for one in ranked] == [documents[one.index] for one in ranked]


def test_rewards_are_logits(cross_encoder: tuple[LLM, Any]) -> None:
    llm, model = cross_encoder
    with torch.inference_mode():
        expected = [model(**encode(text)).logits.item() for text in TEXTS]
    np.testing.assert_allclose([one.score for one in llm.reward(TEXTS)], expected, atol=1e-3)


def test_two_texts_that_are_too_long_are_cut_longest_first(cross_encoder: tuple[LLM, Any]) -> None:
    llm, _ = cross_encoder
    first, second = "cat " * 30, "the mat " * 100
    (found,) = llm.score(first, second, truncate_prompt_tokens=80)
    tokenizer = tiny_wordpiece()
    tokenizer.enable_truncation(80, strategy="longest_first")
    assert found.prompt_token_ids == tokenizer.encode(first, second).ids
    with pytest.raises(InvalidRequestError, match="leaves room for 0 tokens"):
        llm.score(first, second, truncate_prompt_tokens=3)


def write_sentence_transformer(folder: Path, *kinds: str, pooling: dict[str, Any], **settings: Any) -> Path:

    names = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": names[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    return folder


def test_prompts_pooling_and_limits_are_those_of_the_files(tmp_path: Path) -> None:
    model = build_tiny_encoder("modernbert")
    folder = save_encoder(model, tmp_path)
    write_sentence_transformer(
        folder,
        *("Transformer", "Pooling", "Normalize"),
        pooling={"pooling_mode_cls_token": True},
        prompts={"query": "query: ", "document": "passage: "},
        default_prompt_name="document",
    )
    with LLM(str(folder), **_OPTIONS) as llm, torch.inference_mode():
        for name, before in [("query", "query: "), (None, "passage: ")]:
            (found,) = llm.embed(["the cat"], prompt_name=name, dimensions=16, use_tqdm=False)
            first = model(encode(before + "the cat")["input_ids"]).last_hidden_state[0, 0, :16]
            np.testing.assert_allclose(found.embedding, first / first.norm(), atol=1e-4)
        with pytest.raises(
            InvalidRequestError, match=r"prompt_name: 'q' is not one of this model's, .* document, query"
        ):
            llm.embed("a", prompt_name="q", use_tqdm=False)
        with pytest.raises(InvalidRequestError, match=r"context limit \(max_model_len\) is 64"):
            llm.embed("a " * 64, use_tqdm=False)
