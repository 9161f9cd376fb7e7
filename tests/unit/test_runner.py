"""The runner on a tiny random llama, driven by the real scheduler, against transformers and against itself; its state
in tensors, and in numpy arrays with the native library's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from procengine.config import ModelConfig
from procengine.kernels.native import library
from procengine.logits_processors import LogitsContext
from procengine.models.loader import load_model
from procengine.request import RowRules, RowSampling
from procengine.row_features import (
    BAD_WORDS,
    BIAS,
    EARLY_STOPS,
    GRAMMAR,
    MIN_P,
    PENALTIES,
    RANDOM,
    TOP_K,
    TOP_P,
)
from procengine.torch_executor import TorchModel
from tests.model_configs import model_config_from_hf
from tests.unit.host_model import HostModel
from tests.unit.models.tiny_models import save_tiny_model
from tests.unit.runner_engine import PROMPTS, VOCAB, Engine, TinyModel
from tests.unit.simulated_worker import ToyMasks


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A model this small is slower on several."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelConfig, TorchModel]:
    folder: Path = tmp_path_factory.mktemp("llama")
    oracle = save_tiny_model("llama", folder)
    config = model_config_from_hf(oracle.config, folder)
    return oracle, config, TorchModel(load_model(config, torch.float32, "cpu", progress=False))


@pytest.fixture(scope="module", params=["tensors", "arrays"])
def pair(request: pytest.FixtureRequest, tiny: tuple[Any, ModelConfig, TorchModel]) -> tuple[Any, TinyModel]:
    oracle, config, model = tiny
    if request.param == "tensors":
        return oracle, TinyModel(config, model)
    if not library.is_available():
        pytest.skip("the native library is not built")
    return oracle, TinyModel(config, HostModel(model))


def oracle_logits(oracle: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


def oracle_greedy(
    oracle: Any, prompt: list[int], count: int, change: Callable[[Tensor, list[int]], Tensor] = lambda logits, _: logits
) -> list[int]:
    """Greedy tokens by transformers, each from logits that `change(logits, output so far)` gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(change(oracle_logits(oracle, tokens)[-1], tokens[len(prompt) :]).argmax()))
    return tokens[len(prompt) :]


# --- speculation


def six_tokens(logits: Tensor, context: LogitsContext) -> Tensor:
    """What a random model says would hardly ever come again."""
    logits[:, 6:] = -torch.inf
    return logits


@pytest.mark.parametrize(("num_speculative", "depth"), [(1, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_speculation_changes_no_token(
    pair: tuple[Any, TinyModel], temperature: float, num_speculative: int, depth: int
) -> None:
    plain = Engine(pair[1], depth=depth, processors=[six_tokens])
    drafting = Engine(pair[1], depth=depth, processors=[six_tokens], num_speculative_tokens=num_speculative)
    for engine in (plain, drafting):
        for seed, prompt in enumerate([*PROMPTS[:2], PROMPTS[0] * 5]):
            features = RANDOM if temperature else 0
            engine.add(prompt, 50, RowSampling(seed, temperature, features=features))
        engine.run()
    assert drafting.tokens == plain.tokens
    counters = drafting.planner.counters
    assert 10 < counters.num_accepted_tokens < counters.num_draft_tokens


def test_speculation_beside_rows_with_everything_else(pair: tuple[Any, TinyModel]) -> None:
    def add_all(engine: Engine) -> Engine:
        engine.add(PROMPTS[0], 40)
        engine.add(PROMPTS[1], 30, RowSampling(0, features=PENALTIES, repetition_penalty=1.3))
        engine.add(PROMPTS[2], 20, RowSampling(0, num_logprobs=2), num_prompt_logprobs=1)
        engine.add(PROMPTS[3], 30, RowSampling(0, features=GRAMMAR), grammar=ToyMasks())
        return engine.run()

    options: dict[str, Any] = {"max_num_batched_tokens": 24, "processors": [six_tokens]}
    plain = add_all(Engine(pair[1], **options))
    drafting = add_all(Engine(pair[1], **options, num_speculative_tokens=3))
    assert drafting.tokens == plain.tokens
    assert drafting.planner.counters.num_accepted_tokens > 5
    assert [len(drafting.logprobs[key]) for key in range(4)] == [0, 0, 20, 0]
    for (ids, values, ranks), (other_ids, other_values, other_ranks) in zip(
        drafting.logprobs[2], plain.logprobs[2], strict=True
    ):
        assert (ids, ranks) == (other_ids, other_ranks)
        assert values == pytest.approx(other_values, abs=1e-4)


# --- sampling


def add_sampled(engine: Engine) -> Engine:
    """Every filter, alone and with others, beside rules of each kind."""
    filters: list[tuple[int, dict[str, Any]]] = [
        (0, {}),
        (TOP_K, {"top_k": 5}),
        (TOP_P, {"top_p": 0.7}),
        (MIN_P, {"min_p": 0.1}),
        (TOP_K | TOP_P | MIN_P, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}),
    ]
    for seed, (features, values) in enumerate(filters):
        for prompt in PROMPTS:
            engine.add(prompt, 20, RowSampling(seed, 0.9, features=features | RANDOM, **values))
    penalties: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    engine.add(PROMPTS[0], 30, RowSampling(7, 0.8, features=RANDOM | PENALTIES, **penalties), num_prompt_logprobs=3)
    rules = RowRules(logit_bias=((11, 2.0), (12, -3.0)), bad_words=((5, 6), (7,)))
    sampling = RowSampling(8, 1.1, features=RANDOM | BIAS | BAD_WORDS | TOP_K, top_k=9, num_logprobs=4)
    engine.add(PROMPTS[1], 30, sampling, rules=rules)
    engine.add(PROMPTS[2], 20, RowSampling(9, 1.0, features=RANDOM | GRAMMAR), grammar=ToyMasks())
    return engine.run()


def all_logprobs(engine: Engine) -> list[tuple[list[int], list[float], list[int]]]:
    of_samples = [entry for entries in engine.logprobs.values() for entry in entries]
    return of_samples + [entry for entries in engine.prompt.values() for entry in entries.values()]


@pytest.mark.skipif(not library.is_available(), reason="the native library is not built")
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 40, "decode_steps": 3}], ids=str)
def test_tensors_and_arrays_draw_the_same_tokens(
    tiny: tuple[Any, ModelConfig, TorchModel], options: dict[str, Any]
) -> None:
    _, config, model = tiny
    ours, theirs = (add_sampled(Engine(TinyModel(config, kind), **options)) for kind in (HostModel(model), model))
    assert ours.tokens == theirs.tokens
    for found, expected in zip(all_logprobs(ours), all_logprobs(theirs), strict=True):
        assert (found[0], found[2]) == (expected[0], expected[2])
        assert found[1] == pytest.approx(expected[1], abs=1e-5)


# --- log probabilities


@pytest.mark.parametrize("budget", [7, 16, 128])
def test_smp_14_prompt_logprobs_are_those_of_transformers_cold_and_warm(
    pair: tuple[Any, TinyModel], budget: int
) -> None:
    oracle, model = pair
    prompt = (PROMPTS[2] * 3)[:100]  # more than one chunk of logits
    engine = Engine(model, max_num_batched_tokens=budget)
    for _ in range(2):
        engine.add(prompt, 2, num_prompt_logprobs=2)
        engine.add([*prompt[:64], 5, 6], 2, num_prompt_logprobs=0)
        engine.add(prompt[:33], 1)
        engine.run()
    for key, own in ((0, prompt), (1, [*prompt[:64], 5, 6]), (3, prompt), (4, [*prompt[:64], 5, 6])):
        expected = oracle_logits(oracle, own).log_softmax(-1)
        assert sorted(engine.prompt[key]) == list(range(1, len(own)))
        for position, (ids, values, ranks) in engine.prompt[key].items():
            row = expected[position - 1]
            assert ids[0] == own[position]
            assert values[0] == pytest.approx(float(row[own[position]]), abs=1e-3)
            assert ranks[0] == pytest.approx(int((row > row[own[position]]).sum()) + 1, abs=1)
            if key % 3 == 0:
                assert values[1:3] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
                assert ranks[1:3] == [1, 2]


def test_logprobs_are_the_models_own_whatever_changes_the_logits(pair: tuple[Any, TinyModel]) -> None:
    oracle, model = pair
    engine = Engine(model)
    sampling = RowSampling(0, num_logprobs=1, features=BIAS | PENALTIES, repetition_penalty=1.5)
    engine.add(PROMPTS[0], 6, sampling, rules=RowRules(logit_bias=((11, 100.0),)))
    engine.run()
    assert engine.tokens[0] == [11] * 6
    expected = oracle_logits(oracle, PROMPTS[0] + [11] * 5)[len(PROMPTS[0]) - 1 :].log_softmax(-1)
    for (ids, values, _), row in zip(engine.logprobs[0], expected, strict=True):
        assert ids[0] == 11
        assert values == pytest.approx([float(row[11]), float(row.max())], abs=1e-3)


# --- penalties, biases, bans


@pytest.mark.parametrize(("depth", "decode_steps"), [(1, 1), (3, 1), (2, 4)])
def test_smp_08_repetition_penalty_is_that_of_transformers(
    pair: tuple[Any, TinyModel], depth: int, decode_steps: int
) -> None:
    oracle, model = pair
    engine = Engine(model, depth=depth, decode_steps=decode_steps, max_num_batched_tokens=16)
    for prompt in PROMPTS:
        engine.add(prompt, 20, RowSampling(0, features=PENALTIES, repetition_penalty=1.3))
        engine.add(prompt, 20)
    engine.run()
    for at, prompt in enumerate(PROMPTS):
        processor = RepetitionPenaltyLogitsProcessor(1.3)

        def change(logits: Tensor, output: list[int], own: list[int] = prompt, by: Any = processor) -> Tensor:
            changed: Tensor = by(torch.tensor([[*own, *output]]), logits[None].clone())[0]
            return changed

        assert engine.tokens[2 * at] == oracle_greedy(oracle, prompt, 20, change)
        assert engine.tokens[2 * at + 1] == oracle_greedy(oracle, prompt, 20), "a neighbour without it"


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_smp_08_frequency_and_presence_count_the_output_also_after_a_preemption(
    pair: tuple[Any, TinyModel], decode_steps: int
) -> None:
    oracle, model = pair

    def change(logits: Tensor, output: list[int]) -> Tensor:
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)
        return logits - 1.5 * counts - 0.75 * (counts > 0)

    engine = Engine(model, num_blocks=22, decode_steps=decode_steps, max_num_seqs=3)
    sampling = RowSampling(0, features=PENALTIES, frequency_penalty=1.5, presence_penalty=0.75)
    for prompt in PROMPTS:
        engine.add(prompt, 24, sampling)
    engine.run()
    assert engine.planner.counters.num_preemptions > 0
    for key, prompt in enumerate(PROMPTS):
        assert engine.tokens[key] == oracle_greedy(oracle, prompt, 24, change)


def test_bans_and_allowed_tokens_hold_and_neighbours_do_not_notice(pair: tuple[Any, TinyModel]) -> None:
    oracle, model = pair
    free = oracle_greedy(oracle, PROMPTS[0], 12)
    engine = Engine(model)
    engine.add(PROMPTS[0], 12)
    bad = ((free[0],), (free[0], free[1]), tuple(free[:3]))
    engine.add(PROMPTS[0], 12, RowSampling(0, features=BAD_WORDS), rules=RowRules(bad_words=bad[:1]))
    engine.add(PROMPTS[0], 12, RowSampling(0, features=BAD_WORDS), rules=RowRules(bad_words=bad[2:]))
    engine.add(PROMPTS[0], 12, RowSampling(0, features=BIAS), rules=RowRules(allowed_token_ids=(4, 5, 90)))
    engine.add(
        PROMPTS[0],
        12,
        RowSampling(0, features=EARLY_STOPS),
        rules=RowRules(early_stop_ids=(free[0],)),
        stop_token_ids=(free[0],),
        min_position=len(PROMPTS[0]) + 3,
    )
    engine.run()
    assert engine.tokens[0] == free
    assert free[0] not in engine.tokens[1]
    assert engine.tokens[2][:2] == free[:2]
    assert engine.tokens[2][2] != free[2]
    assert set(engine.tokens[3]) <= {4, 5, 90}
    assert free[0] not in engine.tokens[4][:3]


# --- grammars


@pytest.mark.parametrize(("depth", "decode_steps"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_masks_hold_for_their_rows_and_for_no_other(pair: tuple[Any, TinyModel], depth: int, decode_steps: int) -> None:
    """With several passes a step, a constrained row takes part in the first: its mask is nobody's in the others."""
    oracle, model = pair
    engine = Engine(model, depth=depth, decode_steps=decode_steps)
    grammars = [ToyMasks(), ToyMasks()]
    for key, prompt in enumerate(PROMPTS):
        is_free = key % 2
        grammar = None if is_free else grammars[key // 2]
        engine.add(prompt, 20, RowSampling(0, features=0 if is_free else GRAMMAR), grammar=grammar)
    engine.run()
    for key, prompt in enumerate(PROMPTS):
        expected = oracle_greedy(oracle, prompt, 20) if key % 2 else constrained_greedy(oracle, prompt, 20)
        assert engine.tokens[key] == expected


def constrained_greedy(oracle: Any, prompt: list[int], count: int) -> list[int]:
    grammar = ToyMasks()

    def change(logits: Tensor, output: list[int]) -> Tensor:
        if output:
            grammar.consume(output[-1])
        return torch.where(torch.tensor([grammar.allows(token) for token in range(VOCAB)]), logits, -torch.inf)

    return oracle_greedy(oracle, prompt, count, change)


# --- plug-ins


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_processor_sees_whose_logits_they_are_and_has_the_last_word(
    pair: tuple[Any, TinyModel], decode_steps: int
) -> None:
    seen: list[tuple[int, int]] = []

    def processor(logits: Tensor, context: LogitsContext) -> Tensor:
        seen.extend(zip(context.keys.tolist(), context.positions.tolist(), strict=True))
        logits[torch.from_numpy(context.keys == 1), 42] = 1e9
        return logits

    engine = Engine(pair[1], processors=[processor], decode_steps=decode_steps)
    for prompt in PROMPTS[:2]:
        engine.add(prompt, 6)
    engine.run()
    assert engine.tokens[1] == [42] * 6
    assert engine.tokens[0] == oracle_greedy(pair[0], PROMPTS[0], 6)
    expected = [(key, position) for key in (0, 1) for position in range(len(PROMPTS[key]), len(PROMPTS[key]) + 6)]
    assert sorted(seen) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_of_which_everything_is_forbidden_yields_some_token_and_harms_nobody(
    pair: tuple[Any, TinyModel], temperature: float
) -> None:
    engine = Engine(pair[1])
    features = BIAS | EARLY_STOPS | (RANDOM if temperature else 0)
    rules = RowRules(allowed_token_ids=(5,), early_stop_ids=(5,))
    engine.add(PROMPTS[0], 4, RowSampling(0, temperature, features=features), rules=rules, min_position=100)
    engine.add(PROMPTS[1], 6)
    engine.run()
    assert all(0 <= token < VOCAB for token in engine.tokens[0])
    assert engine.tokens[1] == oracle_greedy(pair[0], PROMPTS[1], 6)
