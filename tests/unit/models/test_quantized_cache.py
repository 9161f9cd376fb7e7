"""Models whose keys and values are kept in 8 bits: nearly the logits of floats, whatever their blocks went through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.decode_graphs import graph_sizes
from procengine.kernels.kv_cache.quantized import QuantizedKind
from procengine.layer_groups import layer_groups
from procengine.models.loader import load_model
from procengine.torch_executor import TorchModel
from tests.model_configs import model_config_from_hf
from tests.unit.models.executor_run import ExecutorRun
from tests.unit.models.test_families import _one_thread, oracle_logits
from tests.unit.models.tiny_families import save_family
from tests.unit.models.tiny_models import save_tiny_model
from tests.unit.runner_engine import MAX_MODEL_LEN, PROMPTS, VOCAB, Engine, TinyModel

__all__ = ["_one_thread"]

SEQUENCES = [[(7 * i * i + 3 * i + row) % VOCAB for i in range(length)] for row, length in enumerate((8, 23))]
WHOLE: list[dict[int, int]] = [{0: 8, 1: 23}]
CHUNKS: list[dict[int, int]] = [{0: 5}, {0: 1, 1: 9}, {0: 2, 1: 1}, {1: 12}, {1: 1}]
# Root mean square error of logits, of their spread.
CLOSENESS: dict[QuantizedKind, float] = {"int8": 0.03, "fp8": 0.12}
MODES: dict[str, dict[str, Any]] = {
    "chunks": {"depth": 2, "max_num_batched_tokens": 13},
    "several passes, few blocks": {"depth": 2, "max_num_batched_tokens": 24, "decode_steps": 4, "num_blocks": 60},
    "proposals": {"depth": 2, "num_speculative_tokens": 3},
}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).square().mean().sqrt() / exact.std())


@pytest.mark.parametrize("kind", CLOSENESS)
@pytest.mark.parametrize("family", ["llama-head-dim", "mistral-window", "qwen3", "gpt2"])  # this turns no keys
def test_logits_are_close_whole_and_in_chunks(family: str, kind: QuantizedKind, tmp_path: Path) -> None:
    if family == "gpt2":
        _, config = save_family(family, tmp_path)
    else:
        config = model_config_from_hf(save_tiny_model(family, tmp_path, num_hidden_layers=2).config, tmp_path)
    model = TorchModel(load_model(config, torch.float32, "cpu", progress=False))
    exact = torch.cat(ExecutorRun(model, config, SEQUENCES).run(WHOLE))
    whole, cut = (
        torch.cat(ExecutorRun(model, config, SEQUENCES, block_size=5, kv_dtype=kind).run(plan))
        for plan in (WHOLE, CHUNKS)
    )
    assert 0 < error(whole, exact) < CLOSENESS[kind]
    assert error(cut, whole) < CLOSENESS[kind] / 5, "only a number between two may be rounded otherwise"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelConfig]:
    """Groups of layers: one that sees all, and two with a window."""
    layers = [*["sliding_attention"] * 2, "full_attention"] * 2
    oracle, config = save_family("gemma3", tmp_path_factory.mktemp("gemma3"), num_hidden_layers=6, layer_types=layers)
    assert layer_groups(config, MAX_MODEL_LEN).windows == (None, 7, 7)
    return oracle, config


@pytest.mark.parametrize("kind", CLOSENESS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("graphs", [(), graph_sizes(8)], ids=["eager", "graphs"])
def test_greedy_tokens_are_good_ones_also_of_prompts_in_the_cache(
    gemma: tuple[Any, ModelConfig], graphs: tuple[int, ...], mode: str, kind: QuantizedKind
) -> None:
    oracle, config = gemma
    model = TorchModel(load_model(config, torch.float32, "cpu", progress=False), graphs)
    engine = Engine(TinyModel(config, model), kv_dtype=kind, **MODES[mode])
    for _ in range(2):
        requests = [engine.add(prompt, 9) for prompt in PROMPTS]
        engine.run()
        for request, prompt in zip(requests, PROMPTS, strict=True):
            tokens = engine.tokens[request.key]
            logits = oracle_logits(oracle, prompt + tokens[:-1])[len(prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert float((logits.max(dim=1).values - chosen).max()) < 4 * CLOSENESS[kind] * float(logits.std())
    assert "few" in mode or engine.planner.counters.prefix_hit_tokens > 40
    engine.planner.scheduler.check_integrity()
