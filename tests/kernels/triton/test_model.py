"""A whole model by Triton's kernels, over a paged cache and without one, against the same by torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from procengine.config import KVCacheDType, ModelConfig
from procengine.kernels.backends import Conditions
from procengine.kernels.operations import open_operations
from procengine.models.loader import load_model
from procengine.torch_executor import TorchModel
from tests.model_configs import model_config_from_hf
from tests.unit.models.executor_run import ExecutorRun
from tests.unit.models.test_transformers_model import save
from tests.unit.models.tiny_models import save_tiny_model

SEQUENCES = [[(7 * i * i + 3 * i + row) % 97 for i in range(length)] for row, length in enumerate((8, 12))]
PLAN: list[dict[int, int]] = [{0: 5}, {0: 1, 1: 9}, {0: 2, 1: 1}, {1: 2}]


def by_both_backends(config: ModelConfig, kv_dtype: KVCacheDType = "float32") -> list[TorchModel]:
    """By torch's operations, and by Triton's."""
    conditions = Conditions("cpu", quantized_cache=None if kv_dtype == "float32" else kv_dtype)
    models = []
    for name in ("torch", "triton"):
        operations = open_operations(name, conditions, rowwise_backend=name)
        models.append(TorchModel(load_model(config, torch.float32, "cpu", progress=False, operations=operations)))
    return models


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kv_dtype", "tolerance"),
    [
        ("mistral-window", "float32", 2e-4),  # a sliding window
        ("qwen3", "float32", 2e-4),  # norms of heads
        ("mistral-window", "int8", 0.1),  # a number between two may be rounded to either
        ("qwen3", "fp8", 0.3),
    ],
)
def test_chunks_and_decodes_give_what_torch_gives(
    kind: str, kv_dtype: KVCacheDType, tolerance: float, tmp_path: Path
) -> None:
    config = model_config_from_hf(save_tiny_model(kind, tmp_path, num_hidden_layers=2).config, tmp_path)
    models = by_both_backends(config, kv_dtype)
    found = [ExecutorRun(model, config, SEQUENCES, kv_dtype=kv_dtype).run(PLAN) for model in models]
    for expected, logits in zip(*found, strict=True):
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=1e-4)


def test_sequences_without_a_cache_give_what_torch_gives(tmp_path: Path) -> None:
    """Keys that have been turned lie elsewhere than values, which are a slice of the projection."""
    config = model_config_from_hf(save_tiny_model("llama", tmp_path, num_hidden_layers=2).config, tmp_path)
    ids = torch.tensor(SEQUENCES[0] + SEQUENCES[1], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(one)) for one in SEQUENCES])
    bounds = torch.tensor([0, len(SEQUENCES[0]), len(ids)], dtype=torch.int32)
    with torch.inference_mode():
        expected, hidden = (model.encode(ids, positions, bounds, 12) for model in by_both_backends(config))
    torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=1e-4)


# Heads that lie one behind the other for all tokens; of which there is but one for keys and values.
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1}], ids=str)
def test_modules_of_transformers_may_lay_heads_out_as_they_like(changes: dict[str, Any], tmp_path: Path) -> None:
    _, config = save("StableLm", tmp_path, **changes)
    found = [ExecutorRun(model, config, SEQUENCES).run([{0: 2}, {0: 1, 1: 2}]) for model in by_both_backends(config)]
    for expected, logits in zip(*found, strict=True):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
