"""Models whose layers have windows, in contexts of many windows, against transformers: what is freed is not missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from procengine.decode_graphs import graph_sizes
from procengine.kernels.native import library
from procengine.layer_groups import layer_groups
from procengine.models.loader import load_model
from procengine.models.packed_llama import load_packed
from procengine.models.weights import open_weights
from procengine.native_executor import NativeModel
from procengine.torch_executor import TorchModel
from tests.model_configs import model_config_from_hf
from tests.unit.models.test_families import MIN_GAP, _one_thread, oracle_logits
from tests.unit.models.tiny_families import save_family
from tests.unit.models.tiny_models import save_tiny_model
from tests.unit.runner_engine import MAX_MODEL_LEN, VOCAB, Engine, TinyModel

__all__ = ["_one_thread"]

NUM_TOKENS = 12
SHARED = [(5 * i * i + i) % VOCAB for i in range(70)]
PROMPTS = [
    SHARED,
    [(7 * i * i + 3) % VOCAB for i in range(100)],
    SHARED[:50] + [(3 * i) % VOCAB for i in range(20)],
    [(11 * i * i + i) % VOCAB for i in range(7)],
]
# Layers, groups of layers, the blocks of a pool that they have to fight for.
MODELS: dict[str, tuple[dict[str, Any], tuple[int | None, ...], int]] = {
    "gemma3": (
        {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2},
        (None, 7, 7),
        60,
    ),
    "gemma2": ({"num_hidden_layers": 4, "layer_types": None}, (None, 7), 45),
    "phi3": ({}, (11,), 14),
}
MODES: dict[str, dict[str, Any]] = {
    "whole prompts": {"depth": 1, "max_num_batched_tokens": 128},
    "chunks": {"depth": 2, "max_num_batched_tokens": 9},
    "several passes": {"depth": 2, "max_num_batched_tokens": 24, "decode_steps": 4},
    "proposals": {"depth": 2, "max_num_batched_tokens": 24, "num_speculative_tokens": 3},
    "no cache": {"depth": 3, "max_num_batched_tokens": 24, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TinyModel, int]:
    changes, windows, few_blocks = MODELS[request.param]
    oracle, config = save_family(request.param, tmp_path_factory.mktemp(request.param), **changes)
    assert layer_groups(config, MAX_MODEL_LEN).windows == windows
    loaded = TorchModel(load_model(config, torch.float32, "cpu", progress=False))
    return oracle, TinyModel(config, loaded), few_blocks


def generate(engine: Engine, prompts: list[list[int]] = PROMPTS, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    start = len(engine.tokens)
    for prompt in prompts:
        engine.add(prompt, num_tokens)
    engine.run()
    return list(engine.tokens.values())[start:]


def assert_best(
    oracle: Any, found: list[list[int]], prompts: list[list[int]] = PROMPTS, num_tokens: int = NUM_TOKENS
) -> None:
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == num_tokens
        logits = oracle_logits(oracle, prompt + tokens[:-1])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float((logits.max(dim=1).values - chosen).max()) < MIN_GAP


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_and_those_of_prompts_in_the_cache(pair: tuple[Any, TinyModel, int], mode: str) -> None:
    oracle, model, few_blocks = pair
    for num_blocks in (400, few_blocks):
        engine = Engine(model, **MODES[mode], num_blocks=num_blocks)
        assert_best(oracle, generate(engine))
        num_before = engine.planner.counters.prefix_hit_tokens
        assert_best(oracle, generate(engine))
        if num_blocks == 400 and mode != "no cache":
            assert engine.planner.counters.prefix_hit_tokens - num_before > 200
        engine.planner.scheduler.check_integrity()


def test_rows_that_preempt_each_other(pair: tuple[Any, TinyModel, int]) -> None:
    oracle, model, few_blocks = pair
    prompts = [PROMPTS[1][: 5 + row] for row in range(4)]
    for name in ("several passes", "proposals"):
        engine = Engine(model, **MODES[name], num_blocks=few_blocks)
        assert_best(oracle, generate(engine, prompts, 60), prompts, 60)
        assert engine.planner.counters.num_preemptions > 0


def test_graphs_of_decode_steps_read_the_tables_of_all_groups(pair: tuple[Any, TinyModel, int]) -> None:
    oracle, (config, loaded), few_blocks = pair
    assert isinstance(loaded, TorchModel)
    model = TinyModel(config, TorchModel(loaded.model, graph_sizes(8)))
    for num_blocks in (400, few_blocks):
        assert_best(oracle, generate(Engine(model, max_num_batched_tokens=24, num_blocks=num_blocks)))


@pytest.mark.skipif(not library.is_available(), reason="the native library is not built")
def test_native_kernels_give_the_same_bit_by_bit_from_blocks_that_windows_left(tmp_path: Path) -> None:
    oracle = save_tiny_model("mistral-window", tmp_path, hidden_size=64, intermediate_size=96, initializer_range=0.15)
    config = model_config_from_hf(oracle.config, tmp_path)
    decoder = load_packed(config, open_weights(config), "none", num_threads=1, progress=False)
    model = TinyModel(config, NativeModel(decoder, config.num_layers, "float32"))
    alone = generate(Engine(model, max_num_seqs=1, max_num_batched_tokens=128, depth=1))
    for mode in MODES.values():
        for block_size, num_blocks in ((4, 14), (16, 6)):
            engine = Engine(model, **mode, block_size=block_size, num_blocks=num_blocks)
            assert [generate(engine), generate(engine)] == [alone, alone]
