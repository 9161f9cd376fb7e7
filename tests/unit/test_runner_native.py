"""The runner on the native executor: what a request gets is the same, bit by bit, whatever is computed beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from procengine.config import Quantization
from procengine.kernels.native import library
from procengine.models.packed_llama import load_packed
from procengine.models.weights import open_weights
from procengine.native_executor import NativeModel
from procengine.request import RowSampling
from procengine.row_features import PENALTIES, RANDOM
from tests.model_configs import model_config_from_hf
from tests.unit.models.tiny_models import save_tiny_model
from tests.unit.runner_engine import PROMPTS, Engine, TinyModel

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the native library is not built")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """One checkpoint in several formats."""
    folder: Path = tmp_path_factory.mktemp("llama")
    oracle = save_tiny_model("qwen2", folder, hidden_size=64, intermediate_size=96, initializer_range=0.15)
    config = model_config_from_hf(oracle.config, folder)
    quantizations: tuple[Quantization, ...] = ("none", "int8", "int4")
    found: dict[str, TinyModel] = {}
    for quantization in quantizations:
        decoder = load_packed(config, open_weights(config), quantization, num_threads=1, progress=False)
        found[quantization] = TinyModel(config, NativeModel(decoder, config.num_layers, "float32"))
    return found


def add_all(engine: Engine) -> Engine:
    """Greedy and random rows, some with log probabilities: what each gets is to be compared exactly."""
    engine.add(PROMPTS[0], 20)
    engine.add(PROMPTS[1], 12, RowSampling(3, temperature=0.8, features=RANDOM), num_prompt_logprobs=1)
    engine.add(PROMPTS[2], 16, RowSampling(0, num_logprobs=2))
    engine.add(PROMPTS[3], 20, RowSampling(0, features=PENALTIES, repetition_penalty=1.2))
    return engine


@pytest.fixture(scope="module", params=["none", "int8", "int4"])
def alone(request: pytest.FixtureRequest, models: dict[str, TinyModel]) -> tuple[TinyModel, Engine]:
    """Each request for itself, its prompt in one piece."""
    model = models[request.param]
    engine = Engine(model, max_num_seqs=1, max_num_batched_tokens=128, depth=1)
    return model, add_all(engine).run()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 16, "block_size": 2},
        {"depth": 1, "decode_steps": 4},
        {"depth": 3, "decode_steps": 3, "max_num_batched_tokens": 20},
        {"num_speculative_tokens": 3},
    ],
    ids=str,
)
def test_batching_chunks_depth_and_speculation_change_nothing(
    alone: tuple[TinyModel, Engine], options: dict[str, Any]
) -> None:
    model, expected = alone
    engine = add_all(Engine(model, **options)).run()
    assert engine.tokens == expected.tokens
    assert engine.logprobs == expected.logprobs
    assert engine.prompt == expected.prompt


def test_preemption_changes_nothing(alone: tuple[TinyModel, Engine]) -> None:
    model, expected = alone
    engine = add_all(Engine(model, num_blocks=16)).run()
    assert engine.planner.counters.num_preemptions > 0
    assert (engine.tokens, engine.logprobs, engine.prompt) == (expected.tokens, expected.logprobs, expected.prompt)


def test_cached_prefixes_change_nothing(alone: tuple[TinyModel, Engine]) -> None:
    model, _ = alone
    engine = Engine(model)
    for _ in range(2):
        engine.add(PROMPTS[2], 9)
        engine.run()
    assert engine.planner.counters.prefix_hit_tokens > 0
    assert engine.tokens[0] == engine.tokens[1]
