"""Says which kernels an engine would have to compile, before its first step and later. Run as a program, by a test.

Launches get as far as Triton's own choice among what it has compiled, which is by types, alignments and some numbers;
there is no GPU, so nothing is computed, and what an empty tensor holds is zero.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from procengine.config import ModelConfig
from procengine.decode_graphs import graph_sizes
from procengine.kernels.backends import Conditions
from procengine.kernels.linear.quantized import WeightKind
from procengine.kernels.operations import open_operations
from procengine.models.llama import LlamaModel
from procengine.models.new_tensors import NewTensors
from procengine.request import RowSampling
from procengine.row_features import GRAMMAR, MIN_P, PENALTIES, RANDOM, TOP_K, TOP_P
from procengine.torch_executor import TorchModel
from tests.unit.runner_engine import PROMPTS, Engine, TinyModel
from tests.unit.test_no_device_reads import AnyToken

CONFIG = ModelConfig(
    name="tiny",
    path="",
    format="safetensors",
    architecture="llama",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
)


class NoDriver:
    """What Triton asks of a driver before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def run(kind: WeightKind | None) -> dict[str, list[str]]:
    """Kernels with what they are compiled for: "warm" when the engine is ready, "all" when it has run."""
    operations = open_operations("triton", Conditions("cuda", head_dim=CONFIG.head_dim))
    model = LlamaModel(CONFIG, NewTensors(torch.float32, "cpu"), operations)
    if kind is not None:
        for layer in model.layers:
            layer.quantize(kind, torch.float32)
    found: set[str] = set()

    def note(**told: Any) -> bool:
        found.add(f"{told['fn'].name} {told['compile']['key']}")
        return True  # that is all

    knobs.runtime.jit_cache_hook = note
    engine = Engine(
        TinyModel(CONFIG, TorchModel(model, graph_sizes(8))),
        max_model_len=2048,
        max_num_batched_tokens=40,
        num_blocks=700,
    )
    warm = sorted(found)
    for number, features in enumerate((0, RANDOM, RANDOM | TOP_K, RANDOM | TOP_P | MIN_P, PENALTIES)):
        own: dict[str, Any] = {"num_logprobs": 2} if number % 2 else {}
        sampling = RowSampling(number, 0.9 * (features > 0), features=features, **own)
        engine.add(PROMPTS[number % 4], 5 + number, sampling, num_prompt_logprobs=number % 3)
    engine.add(PROMPTS[3], 6, RowSampling(3, features=GRAMMAR), grammar=AnyToken())
    engine.add(PROMPTS[2] * 20, 9)  # into its second split
    engine.run()
    return {"warm": warm, "all": sorted(found)}


if __name__ == "__main__":
    driver.set_active(NoDriver())
    torch.empty = torch.zeros  # type: ignore[assignment]
    kinds: dict[str, WeightKind | None] = {"none": None, "int4": "int4"}
    with torch.inference_mode():
        sys.stdout.write(json.dumps(run(kinds[sys.argv[1]])) + "\n")
