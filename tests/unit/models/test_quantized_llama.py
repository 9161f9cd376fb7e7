"""A model with weights of few bits: close to its floats, the same when it decodes, and half as large or less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.kernels.linear.quantized import WeightKind
from procengine.kernels.operations import TORCH_OPERATIONS, Operations
from procengine.models.loader import load_model
from procengine.torch_executor import TorchModel
from tests.model_configs import model_config_from_hf
from tests.unit.models.executor_run import ExecutorRun
from tests.unit.models.tiny_models import save_tiny_model
from tests.unit.runner_engine import PROMPTS, Engine, TinyModel

SEQUENCES = [[(7 * i * i + 3 * i + row) % 97 for i in range(length)] for row, length in enumerate((8, 12))]
WHOLE: list[dict[int, int]] = [{0: 8, 1: 12}]
PLAN: list[dict[int, int]] = [{0: 5}, {0: 1, 1: 9}, {0: 2, 1: 1}, {1: 2}]
# Of the spread of the logits. The same with packed weights: tests/unit/models/test_native_llama.py.
CLOSENESS: dict[WeightKind, float] = {"int8": 0.02, "int4": 0.4, "fp8": 0.12}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """With biases, norms of heads and a tied head."""
    folder: Path = tmp_path_factory.mktemp("qwen3")
    saved = save_tiny_model("qwen3", folder, intermediate_size=64, num_hidden_layers=2, attention_bias=True)
    return model_config_from_hf(saved.config, folder)


def load(config: ModelConfig, kind: WeightKind | None, operations: Operations = TORCH_OPERATIONS) -> TorchModel:
    return TorchModel(load_model(config, torch.float32, "cpu", False, operations, kind or "none"))


def run(model: TorchModel, config: ModelConfig, plan: list[dict[int, int]]) -> Tensor:
    return torch.cat(ExecutorRun(model, config, SEQUENCES).run(plan))


@pytest.mark.parametrize("kind", CLOSENESS)
def test_logits_are_close_and_the_same_in_chunks(kind: WeightKind, config: ModelConfig) -> None:
    exact, model = run(load(config, None), config, WHOLE), load(config, kind)
    assert model.facts["quantization"] == kind
    found = run(model, config, WHOLE)
    error = float((found - exact).square().mean().sqrt() / exact.std())
    assert 0 < error < CLOSENESS[kind]
    torch.testing.assert_close(run(model, config, PLAN), found, atol=2e-4, rtol=1e-4)


def test_an_engine_runs_on_them(config: ModelConfig) -> None:
    model = TinyModel(config, load(config, "int4"))
    found = []
    runs: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {"decode_steps": 3, "max_num_batched_tokens": 20})]
    for depth, changes in runs:
        engine = Engine(model, depth=depth, **changes)
        for prompt in PROMPTS:
            engine.add(prompt, 6)
        found.append(engine.run().tokens)
    assert found[0] == found[1]
    assert all(len(tokens) == 6 for tokens in found[0].values())
