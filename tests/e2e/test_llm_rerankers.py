"""Language models that rerank, through whole groups and HTTP: the logits that transformers gives behind the prompt."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import convert

from procengine import AsyncClient, ConfigError, InvalidRequestError, ModelError
from procengine.engine_args import EngineArgs
from procengine.pair_template import DEFAULT_INSTRUCTION, QWEN3_RERANKER
from procengine.resolve import resolve
from procengine.tokenizer import Tokenizer
from tests.e2e.oracle import one_thread
from tests.e2e.running_group import RunningGroup
from tests.e2e.tiny_folders import build_tiny_model, save_folder

_TEMPLATE = "<|start|>I: {instruction}\nQ: {query}\nD: {document}<|end|>A:"
_DOCUMENTS = ["the cat sat on the mat", "Paris", "日本 the"]
_OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_num_seqs": 8, "num_blocks": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(build_tiny_model("qwen3"), tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[RunningGroup]:
    options = {"score_tokens": ["cat", "t"], "score_template": _TEMPLATE, "port": 0}
    with RunningGroup(folder, **_OPTIONS, **options) as running:
        yield running


def prompt_ids(folder: Path, query: str, document: str, instruction: str = DEFAULT_INSTRUCTION) -> list[int]:
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    first, last = f"<|start|>I: {instruction}\nQ: {query}\nD: {document}", "<|end|>A:"
    return [*tokenizer.encode(first, False), *tokenizer.encode(last, False)]


def margin(folder: Path, token_ids: list[int]) -> float:
    """By how much the model would rather say "cat" than "t" next."""
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    with one_thread(), torch.inference_mode():
        logits = build_tiny_model("qwen3")(torch.tensor([token_ids])).logits[0, -1]
    return float(logits[tokenizer.token_to_id("cat")] - logits[tokenizer.token_to_id("t")])


def expected_scores(folder: Path, **options: str) -> list[float]:
    margins = [margin(folder, prompt_ids(folder, "the cat", one, **options)) for one in _DOCUMENTS]
    return [1 / (1 + np.exp(-one)) for one in margins]


def test_scores_are_how_surely_it_says_yes(group: RunningGroup, folder: Path) -> None:
    found = group.client.score("the cat", _DOCUMENTS)
    assert [one.prompt_token_ids for one in found] == [prompt_ids(folder, "the cat", one) for one in _DOCUMENTS]
    np.testing.assert_allclose([one.score for one in found], expected_scores(folder), atol=1e-4)
    (raw,) = group.client.ask("score", [{"prompt": "a", "text_pair": "b", "use_activation": False}])
    assert raw[0] == pytest.approx(margin(folder, prompt_ids(folder, "a", "b")), abs=1e-3)


def test_rerank_by_every_client(group: RunningGroup, folder: Path) -> None:
    expected = expected_scores(folder, instruction="find cats")
    order = np.argsort(np.negative(expected)).tolist()

    async def ask() -> list[int]:
        async with AsyncClient(group.endpoint) as client:
            return [one.index for one in await client.rerank("the cat", _DOCUMENTS, instruction="find cats")]

    assert asyncio.run(ask()) == order
    found = group.client.rerank("the cat", _DOCUMENTS, instruction="find cats", top_n=2)
    assert [one.index for one in found] == order[:2]
    answer = post(group, "/v1/rerank", query="the cat", documents=_DOCUMENTS, instruction="find cats")
    assert [one["index"] for one in answer["results"]] == order
    np.testing.assert_allclose(
        [one["relevance_score"] for one in answer["results"]], np.sort(expected)[::-1], atol=1e-4
    )
    answer = post(group, "/v1/score", text_1="the cat", text_2=_DOCUMENTS, instruction="find cats")
    np.testing.assert_allclose([one["score"] for one in answer["data"]], expected, atol=1e-4)


def test_texts_are_scored_over_http(group: RunningGroup) -> None:
    answer = post(group, "/pooling", input=["the cat", "Paris"], task="score_text")
    found = group.client.score_text(["the cat", "Paris"])
    for one, output in zip(answer["data"], found, strict=True):
        np.testing.assert_allclose(one["data"], output.logprobs, atol=1e-4)


def test_of_a_long_document_the_end_goes(group: RunningGroup, folder: Path) -> None:
    whole, behind = prompt_ids(folder, "q", "the cat " * 50), prompt_ids(folder, "q", "")[-5:]
    (found,) = group.client.score("q", "the cat " * 50, truncate_prompt_tokens=120)
    tail = Tokenizer.load(folder / "tokenizer.json").encode("<|end|>A:", False)
    assert behind[-len(tail) :] == tail
    assert found.prompt_token_ids == [*whole[: 120 - len(tail)], *tail]
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens: 2 leave no room beside the 3 tokens"):
        group.client.score("q", "d", truncate_prompt_tokens=2)


def test_it_generates_too(group: RunningGroup) -> None:
    assert group.client.generate("the cat").outputs[0].token_ids


def post(group: RunningGroup, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        str(group.ready["http"]) + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def resolved(folder: Path, **options: Any) -> Any:
    return resolve(convert({"model": str(folder), "num_blocks": 8, **options}, EngineArgs)).model


def test_the_files_may_say_it(folder: Path, tmp_path: Path) -> None:
    own = save_folder(build_tiny_model("qwen3"), tmp_path)
    config = json.loads((own / "config.json").read_text())
    cat, t = (Tokenizer.load(own / "tokenizer.json").token_to_id(token) for token in ("cat", "t"))
    (own / "config.json").write_text(json.dumps({**config, "classifier_from_token": ["t", "cat"]}))
    model = resolved(own)
    assert (model.score_token_ids, model.pair_template) == ((cat, t), QWEN3_RERANKER)
    assert "score" in model.workflows
    (own / "config.json").write_text(json.dumps(config))
    (own / "modules.json").write_text(
        json.dumps([{"type": "a.Transformer", "path": ""}, {"type": "b.LogitScore", "path": "1_LogitScore"}])
    )
    (own / "1_LogitScore").mkdir()
    (own / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": cat}))
    (own / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'query' %}Q:{{ m.content }}{% elif m.role == 'document' %}"
        " D:{{ m.content }}{% endif %}{% endfor %}"
    )
    model = resolved(own)
    assert (model.score_token_ids, model.pair_template) == ((cat,), "Q:{query} D:{document}")
    assert "score" not in resolved(folder).workflows


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"score_tokens": ["yes and no"]}, r"score_tokens: 'yes and no' is \d+ tokens of this model, must be one"),
        ({"score_tokens": ["a", "b", "c"]}, r"score_tokens: must be one token or two \(yes, no\), got 3"),
        ({"score_template": "{query}{document}"}, "does not score pairs; score_tokens make it do so"),
        ({"score_tokens": ["a"], "score_template": "no-such-file"}, "is neither a text with .* nor a file"),
        ({"score_tokens": ["a"], "score_template": "{document}"}, "must hold {query} and {document} once"),
    ],
)
def test_what_makes_no_reranker_is_refused(folder: Path, options: dict[str, Any], error: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=error):
        resolved(folder, **options)
