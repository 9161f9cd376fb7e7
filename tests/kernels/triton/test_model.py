"""A whole model by Triton's kernels, over a paged cache, against the same by torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from procengine.config import KVCacheDType
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
    found = []
    for name in ("torch", "triton"):
        quantized = None if kv_dtype == "float32" else kv_dtype
        operations = open_operations(name, Conditions("cpu", quantized_cache=quantized), rowwise_backend=name)
        model = TorchModel(load_model(config, torch.float32, "cpu", progress=False, operations=operations))
        found.append(ExecutorRun(model, config, SEQUENCES, kv_dtype=kv_dtype).run(PLAN))
    for expected, logits in zip(*found, strict=True):
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=1e-4)
