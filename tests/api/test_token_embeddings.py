"""`/pooling` of a model with bge-m3's heads: the client's numbers, in shapes that JSON has."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from procengine.client import Client
from procengine.engine_args import EngineArgs
from procengine.launch import launch_group
from procengine.resolve import resolve
from tests.api.http_client import HttpClient
from tests.tiny_encoders import build_tiny_encoder, save_encoder

TEXTS = ["the cat sat", "hello hello world"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HttpClient, Client]]:
    folder = save_encoder(build_tiny_encoder("xlm-roberta"), tmp_path_factory.mktemp("m3"))
    torch.save({"weight": torch.full((1, 48), 0.1), "bias": torch.ones(1) * 9}, folder / "sparse_linear.pt")
    torch.save(torch.nn.Linear(48, 6).state_dict(), folder / "colbert_linear.pt")
    with tempfile.TemporaryDirectory(prefix="pe-", dir="/tmp") as run_dir, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROCENGINE_RUN_DIR", run_dir)
        config = resolve(EngineArgs(model=str(folder), port=0, threads=1))
        with launch_group(config) as group, Client(group.endpoint) as client:
            yield HttpClient(group.ready["http"]), client


def test_sparse_is_token_ids_and_their_weights(served: tuple[HttpClient, Client]) -> None:
    http, client = served
    answer = http.post("/pooling", {"input": TEXTS, "task": "embed_sparse"}).json
    expected = client.embed_sparse(TEXTS)
    assert [len(one.weights) for one in expected] == [3, 2]
    for one, weights in zip(answer["data"], expected, strict=True):
        assert one["data"]["indices"] == sorted(weights.weights)
        assert one["data"]["values"] == pytest.approx([weights.weights[at] for at in sorted(weights.weights)])
    assert answer["usage"]["prompt_tokens"] == sum(len(one.prompt_token_ids) for one in expected)


@pytest.mark.parametrize("task", ["embed_multi", "token_embed"])
def test_multi_is_a_list_of_vectors(served: tuple[HttpClient, Client], task: str) -> None:
    http, client = served
    expected = client.embed_multi(TEXTS)
    data = http.post("/pooling", {"input": TEXTS, "task": task}).json["data"]
    for one, vectors in zip(data, expected, strict=True):
        np.testing.assert_allclose(one["data"], vectors.vectors(), atol=1e-6)
    raw = http.post("/pooling", {"input": TEXTS, "task": task, "encoding_format": "base64"}).json["data"]
    assert [base64.b64decode(one["data"]) for one in raw] == [one.data for one in expected]
    assert http.post("/pooling", {"input": [[7]], "task": task}).json["data"][0]["data"] == []


def test_options_of_other_tasks_are_refused(served: tuple[HttpClient, Client]) -> None:
    http, _ = served
    assert http.post("/pooling", {"input": "a", "task": "embed_sparse", "dimensions": 3}).error["param"] == "dimensions"
    assert http.post("/pooling", {"input": "a", "task": "token_classify"}).status == 400
