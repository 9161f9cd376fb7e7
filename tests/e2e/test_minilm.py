"""all-MiniLM-L6-v2 on the native kernels: sentence-transformers' vectors, whatever the batch (EMB-01, EMB-02)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from procengine import LLM, ModelError
from procengine.hub import pull

pytestmark = pytest.mark.model

HELLO = [-0.034477, 0.031023, 0.006735, 0.026109, -0.039362]
_FAR = 1e-5  # 1 - cosine


@pytest.fixture(scope="module")
def folder(procengine_home: Path) -> Path:
    return pull("minilm-l6-v2", procengine_home)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder)) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    from transformers import AutoModel

    torch.set_num_threads(1)  # beside a group that computes, more of them wait for each other
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def texts(count: int, seed: int) -> list[str]:
    """Of 1 to some 300 tokens, with characters that are no letters."""
    source = random.Random(seed)
    words = ["The", "quick", "brown", "fox", "naïve", "日本語", "😀", "μ-law", "3.14159", "don't", "https://a.b/c?d=e"]
    return [" ".join(source.choices(words, k=int(2 ** source.uniform(0, 7)))) for _ in range(count)]


def expected(model: Any, ids: list[int]) -> NDArray[np.float64]:
    """transformers' hidden states, pooled as the model's files say."""
    with torch.inference_mode():
        mean = model(torch.tensor([ids])).last_hidden_state[0].double().mean(0)
    vector: NDArray[np.float64] = (mean / mean.norm()).numpy()
    return vector


def distances(found: Any, wanted: Any) -> NDArray[np.float64]:
    a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    products: NDArray[np.float64] = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    return 1 - products


def test_vectors_are_those_of_sentence_transformers(llm: LLM, oracle: Any) -> None:
    outputs = llm.embed(texts(40, seed=1), truncate_prompt_tokens=-1, use_tqdm=False)
    assert max(len(one.prompt_token_ids) for one in outputs) == 256  # as sentence_bert_config.json says
    wanted = [expected(oracle, one.prompt_token_ids) for one in outputs]
    assert distances([one.embedding for one in outputs], wanted).max() < _FAR
    (hello,) = llm.embed(["Hello world"], use_tqdm=False)
    np.testing.assert_allclose(hello.embedding[:5], HELLO, atol=1e-4)


def test_a_vector_does_not_depend_on_its_batch(llm: LLM) -> None:
    alone = llm.embed("Hello world", use_tqdm=False)[0].embedding
    for num_mates in (1, 7, 31):
        batch = texts(num_mates, seed=num_mates)
        for place in {0, num_mates // 2, num_mates}:
            batch_with = [*batch[:place], "Hello world", *batch[place:]]
            found = llm.embed(batch_with, truncate_prompt_tokens=-1, use_tqdm=False)[place]
            assert found.embedding == alone  # bit by bit
    with ThreadPoolExecutor(16) as threads:
        many = list(threads.map(lambda i: llm.embed(["Hello world", "mate " * i], use_tqdm=False)[0], range(1, 101)))
    assert all(one.embedding == alone for one in many)


def test_emb_02_pooling_and_normalisation_come_from_the_files(folder: Path, oracle: Any, tmp_path: Path) -> None:
    def embed(**options: Any) -> NDArray[np.float64]:
        with LLM(str(copy), **options) as llm:
            return np.array(llm.embed("Hello world", use_tqdm=False)[0].embedding)

    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    pooling = copy / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"embedding_dimension": 384, "pooling_mode": "mean", "include_prompt": True}))
    np.testing.assert_allclose(embed()[:5], HELLO, atol=1e-4)
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    with torch.inference_mode():
        states = oracle(torch.tensor([[101, 7592, 2088, 102]])).last_hidden_state[0]
    assert distances(embed(), states[0]) < _FAR
    modules = json.loads((copy / "modules.json").read_text())
    (copy / "modules.json").write_text(json.dumps([one for one in modules if "Normalize" not in one["type"]]))
    pooling.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    assert np.linalg.norm(embed()) == pytest.approx(5.7268, abs=2e-3)
    assert np.linalg.norm(embed(kernels="torch")) == pytest.approx(5.7268, abs=1e-4)
    pooling.write_text(json.dumps({"pooling_mode": "attention"}))
    with pytest.raises(ModelError, match="1_Pooling: attention is not supported"):
        embed()
