"""Cross encoders and classifiers over HTTP: the numbers are the client's, in the shapes of each route."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from procengine.client import Client
from procengine.engine_args import EngineArgs
from procengine.launch import launch_group
from procengine.resolve import resolve
from tests.api.http_client import HttpClient
from tests.tiny_encoders import build_tiny_encoder, save_encoder

TEXTS = ["the cat", "hello world"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HttpClient, Client]]:
    model = build_tiny_encoder("bert", "ForSequenceClassification", num_labels=1, id2label={0: "fits"})
    folder: Path = save_encoder(model, tmp_path_factory.mktemp("cross"))
    with tempfile.TemporaryDirectory(prefix="pe-", dir="/tmp") as run_dir, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROCENGINE_RUN_DIR", run_dir)
        config = resolve(EngineArgs(model=str(folder), port=0, threads=1))
        with launch_group(config) as group, Client(group.endpoint) as client:
            yield HttpClient(group.ready["http"]), client


def test_score_and_rerank_ask_the_cross_encoder(served: tuple[HttpClient, Client]) -> None:
    http, client = served
    expected = [one.score for one in client.score("the mat", TEXTS)]
    scored = http.post("/v1/score", {"text_1": "the mat", "text_2": TEXTS}).json
    assert [one["score"] for one in scored["data"]] == pytest.approx(expected, abs=1e-6)
    ranked = http.post("/v1/rerank", {"query": "the mat", "documents": TEXTS}).json["results"]
    assert [one["relevance_score"] for one in ranked] == pytest.approx(sorted(expected, reverse=True), abs=1e-6)
    assert [TEXTS[one["index"]] for one in ranked] == [one["document"]["text"] for one in ranked]


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_classify_names_the_labels(served: tuple[HttpClient, Client], path: str) -> None:
    http, client = served
    answer = http.post(path, {"input": TEXTS}).json
    expected = [
        {"index": i, "label": "fits", "probs": one.scores, "num_classes": 1}
        for i, one in enumerate(client.classify(TEXTS))
    ]
    assert [{**one, "probs": pytest.approx(one["probs"], abs=1e-6)} for one in answer["data"]] == expected
    logits = http.post(path, {"input": TEXTS, "use_activation": False}).json["data"]
    assert [one["probs"][0] for one in logits] == pytest.approx([one.score for one in client.reward(TEXTS)], abs=1e-5)


def test_pooling_gives_what_a_task_gives(served: tuple[HttpClient, Client]) -> None:
    http, client = served
    states = http.post("/pooling", {"input": TEXTS, "task": "hidden_states", "layer": 1}).json["data"]
    for one, expected in zip(states, client.hidden_states(TEXTS, layer=1), strict=True):
        np.testing.assert_allclose(np.ravel(one["data"]), np.frombuffer(expected.data, "<f4"), atol=1e-6)
    embedded = http.post(
        "/pooling", {"input": "the cat", "task": "embed", "dimensions": 5, "encoding_format": "base64"}
    ).json["data"]
    vector = np.frombuffer(base64.b64decode(embedded[0]["data"]), "<f4")
    np.testing.assert_allclose(vector, client.embed("the cat", dimensions=5).embedding, atol=1e-6)


def test_texts_that_are_too_long_are_refused_or_cut(served: tuple[HttpClient, Client]) -> None:
    http, _ = served
    long = "cat " * 300
    refused = http.post("/v1/embeddings", {"input": long})
    assert refused.status == 400 and "context limit" in refused.error["message"]
    cut = http.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1}).json
    assert cut["usage"]["prompt_tokens"] == 160
    assert http.post("/pooling", {"input": "a", "task": "embed", "layer": 1}).error["param"] == "layer"
    assert http.post("/v1/completions", {"prompt": "a"}).error["code"] == "unsupported_workflow"
