"""Each decoder family against transformers in float32: what is read of its folder, its logits, and what it generates
through a scheduler and a runner, in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from procengine.layer_groups import layer_groups
from procengine.models.loader import load_model
from procengine.torch_executor import TorchModel
from tests.unit.models.executor_run import ExecutorRun
from tests.unit.models.tiny_families import FAMILIES, save_family
from tests.unit.runner_engine import MAX_MODEL_LEN, PROMPTS, VOCAB, Engine, TinyModel

SEQUENCES = [[(7 * i * i + 3 * i + row) % VOCAB for i in range(length)] for row, length in enumerate((23, 40, 9))]
CHUNKS: list[dict[int, int]] = [
    *({0: 5}, {0: 1, 1: 16}, {0: 3, 1: 1, 2: 8}, {0: 1, 1: 11, 2: 1}, {0: 12}, {0: 1, 1: 5}),
    *({1: 1} for _ in range(7)),
]
CROWDED = {"depth": 2, "decode_steps": 4, "max_num_batched_tokens": 24, "num_blocks": 20}  # they preempt each other
OTHER_MODES: list[dict[str, Any]] = [
    {"depth": 1},
    {"depth": 1, "max_num_batched_tokens": 24, "num_blocks": 20},
    {"depth": 2, "max_num_batched_tokens": 24},
    {"depth": 2, "decode_steps": 4, "num_blocks": 20},
    {"depth": 3, "decode_steps": 2, "max_num_batched_tokens": 24},
]
NUM_TOKENS = 9
MIN_GAP = 1e-3  # far above what the order of float32 additions moves a logit


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TinyModel]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    oracle, config = save_family(request.param, folder)
    return oracle, TinyModel(config, TorchModel(load_model(config, torch.float32, "cpu", progress=False)))


def oracle_logits(oracle: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


def test_logits_of_chunks_and_decodes(pair: tuple[Any, TinyModel]) -> None:
    oracle, model = pair
    found = ExecutorRun(model.loaded, model.config, SEQUENCES).run(CHUNKS)
    for logits, sequence in zip(found, SEQUENCES, strict=True):
        torch.testing.assert_close(logits, oracle_logits(oracle, sequence), atol=1e-4, rtol=1e-4)


def assert_states(oracle: Any, model: TinyModel) -> None:
    """What each layer gives, of sequences one behind the other."""
    bounds = torch.tensor([0, *accumulate(map(len, SEQUENCES))], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(sequence)) for sequence in SEQUENCES])
    ids = torch.tensor([token for sequence in SEQUENCES for token in sequence], dtype=torch.int32)
    longest, num_layers = max(map(len, SEQUENCES)), model.config.num_layers
    with torch.inference_mode():
        each = [oracle(torch.tensor([one]), output_hidden_states=True).hidden_states for one in SEQUENCES]
        for layer in range(num_layers + 1):
            asked = layer if layer < num_layers else None
            found = model.loaded.encode(ids, positions, bounds, longest, asked)
            expected = torch.cat([states[layer][0] for states in each])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_hidden_states_of_every_layer(pair: tuple[Any, TinyModel]) -> None:
    assert_states(*pair)


def generate(model: TinyModel, num_rounds: int, **mode: Any) -> list[list[int]]:
    """Greedy tokens of the prompts; each round but the first finds them in the cache, or what is left of them."""
    groups = layer_groups(model.config, MAX_MODEL_LEN)
    if "num_blocks" in mode:
        mode["num_blocks"] *= groups.num_groups  # each takes its own of them
    engine = Engine(model, **mode)
    for _ in range(num_rounds):
        for prompt in PROMPTS:
            engine.add(prompt, NUM_TOKENS)
        engine.run()
    counters = engine.planner.counters
    if groups.windows == (None,):  # others hold hardly more than when they start
        assert ("num_blocks" in mode) == (counters.num_preemptions > 0)
    assert (num_rounds > 1) == (counters.prefix_hit_tokens > 0)
    return list(engine.tokens.values())


def assert_best(oracle: Any, found: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        best = oracle_logits(oracle, prompt + tokens[:-1])[len(prompt) - 1 :].topk(2)
        assert tokens == best.indices[:, 0].tolist()
        assert float((best.values[:, 0] - best.values[:, 1]).min()) > MIN_GAP, "give the family another seed"


def test_greedy_tokens_of_prompts_that_preempt_each_other(pair: tuple[Any, TinyModel]) -> None:
    oracle, model = pair
    assert_best(oracle, generate(model, 1, **CROWDED))


@pytest.mark.slow
def test_greedy_tokens_in_every_other_mode(pair: tuple[Any, TinyModel]) -> None:
    oracle, model = pair
    for mode in OTHER_MODES:
        found = generate(model, 2, **mode)
        assert found[: len(PROMPTS)] == found[len(PROMPTS) :]
        assert_best(oracle, found[: len(PROMPTS)])
