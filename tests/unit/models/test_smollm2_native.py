"""The real SmolLM2-135M natively, in each format, against its dequantised weights in float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from procengine.config import DType, ModelConfig, Quantization
from procengine.executor import Model
from procengine.kernels.native import library
from procengine.model_source import resolve_model
from procengine.models.loader import load_model
from procengine.models.packed_llama import load_packed
from procengine.models.weights import open_weights
from procengine.native_executor import NativeModel
from procengine.tokenizer import Tokenizer
from procengine.torch_executor import TorchModel
from tests.unit.models.executor_run import ExecutorRun

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not library.is_available(), reason="the native library is not built"),
]

PROMPTS = ["The capital of France is", "Once upon a time, there was a", "Water boils at", "def fibonacci(n):\n"]
MAX_TOKENS = 24
DECIDED = 0.5  # where float32's best logit is ahead by as much, no format may choose another token
# Perplexity over ~1000 tokens, against float32's. `scripts/perplexity` takes longer texts, where the share is smaller.
LIMITS: dict[Quantization, float] = {"stored": 0.01, "none": 0.01, "int8": 0.01}


class Reference(NamedTuple):
    config: ModelConfig
    model: TorchModel
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    config = resolve_model(str(smollm2_gguf), tmp_path_factory.mktemp("home"))
    model = TorchModel(load_model(config, torch.float32, "cpu", progress=False))
    return Reference(config, model, Tokenizer.load(config.tokenizer_path))


@pytest.fixture(scope="module")
def continuations(reference: Reference) -> list[tuple[list[int], Tensor]]:
    """Prompt and greedy answer in float32, and the logits of the answer's positions."""
    found = []
    for prompt in PROMPTS:
        token_ids = list(reference.tokenizer.encode(prompt))
        start = len(token_ids)
        sequence = token_ids + [0] * MAX_TOKENS
        run = ExecutorRun(reference.model, reference.config, [sequence], block_size=16)
        rows = [run.logits({0: start})[0][-1]]
        for position in range(start, len(sequence)):
            sequence[position] = int(rows[-1].argmax())
            rows.append(run.logits({0: 1})[0][-1])
        found.append((sequence, torch.stack(rows[:-1])))
    return found


@pytest.fixture(scope="module", params=LIMITS)
def native(request: pytest.FixtureRequest, reference: Reference) -> tuple[Quantization, NativeModel]:
    source = open_weights(reference.config)
    decoder = load_packed(reference.config, source, request.param, num_threads=2, progress=False)
    return request.param, NativeModel(decoder, reference.config.num_layers, "bfloat16")


def test_greedy_tokens_are_those_of_float32_where_it_is_decided(
    native: tuple[Quantization, NativeModel], reference: Reference, continuations: list[tuple[list[int], Tensor]]
) -> None:
    num_decided = 0
    for sequence, expected in continuations:
        run = ExecutorRun(native[1], reference.config, [sequence], block_size=16, kv_dtype="bfloat16")
        start = len(sequence) - MAX_TOKENS
        found = [run.logits({0: start})[0][-1], *(run.logits({0: 1})[0][-1] for _ in range(MAX_TOKENS - 1))]
        best = expected.topk(2).values
        is_decided = best[:, 0] - best[:, 1] > DECIDED
        assert torch.equal(torch.stack(found).argmax(1)[is_decided], expected.argmax(1)[is_decided])
        num_decided += int(is_decided.sum())
    assert num_decided > len(PROMPTS) * MAX_TOKENS // 2


@pytest.fixture(scope="module")
def text(reference: Reference) -> tuple[list[int], float]:
    """Some text, and its loss in float32."""
    whole = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    token_ids = list(reference.tokenizer.encode(whole))[:1024]
    return token_ids, loss(reference.model, reference.config, token_ids, "float32")


def loss(model: Model[Any], config: ModelConfig, token_ids: list[int], kv_dtype: DType) -> float:
    run = ExecutorRun(model, config, [token_ids], block_size=16, kv_dtype=kv_dtype)
    logits = run.logits({0: len(token_ids)})[0]
    return float(functional.cross_entropy(logits[:-1].double(), torch.tensor(token_ids[1:])))


def test_perplexity_stays_near_that_of_float32(
    native: tuple[Quantization, NativeModel], reference: Reference, text: tuple[list[int], float]
) -> None:
    token_ids, expected = text
    found = loss(native[1], reference.config, token_ids, "bfloat16")
    assert abs(math.expm1(found - expected)) < LIMITS[native[0]]
