"""A whole model by Triton's kernels, over a paged cache, against the same by torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from procengine.kernels.backends import Conditions
from procengine.kernels.operations import open_operations
from procengine.models.loader import load_model
from procengine.torch_executor import TorchModel
from tests.model_configs import model_config_from_hf
from tests.unit.models.executor_run import ExecutorRun
from tests.unit.models.tiny_models import save_tiny_model

SEQUENCES = [[(7 * i * i + 3 * i + row) % 97 for i in range(length)] for row, length in enumerate((8, 12))]
PLAN: list[dict[int, int]] = [{0: 5}, {0: 1, 1: 9}, {0: 2, 1: 1}, {1: 2}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral-window", "qwen3"])  # a sliding window; norms of heads
def test_chunks_and_decodes_give_what_torch_gives(kind: str, tmp_path: Path) -> None:
    config = model_config_from_hf(save_tiny_model(kind, tmp_path, num_hidden_layers=2).config, tmp_path)
    found = []
    for name in ("torch", "triton"):
        operations = open_operations(name, Conditions("cpu"), rowwise_backend=name)
        model = TorchModel(load_model(config, torch.float32, "cpu", progress=False, operations=operations))
        found.append(ExecutorRun(model, config, SEQUENCES).run(PLAN))
    for expected, logits in zip(*found, strict=True):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
