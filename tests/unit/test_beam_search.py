"""Beam search against a plain search of everything, on toy distributions that are known in full."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procengine.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence, search
from procengine.client_bodies import Body
from procengine.config import EngineConfig, GroupConfig, LimitsConfig, ModelConfig, SchedulerConfig
from procengine.errors import InvalidRequestError
from procengine.outputs import CompletionOutput, Logprob, RequestOutput
from procengine.sampling_params import SamplingParams

VOCAB = 5
EOS = (0, 3)
PROMPT = [4, 4, 1]

Model = Callable[[Sequence[int]], np.ndarray]


def toy_model(seed: int) -> Model:
    """Log probabilities, float64 [VOCAB], that depend on all tokens so far."""

    def model(tokens: Sequence[int]) -> np.ndarray:
        logits = np.random.default_rng([seed, *tokens]).normal(0.0, 2.0, VOCAB)
        return np.asarray(logits - np.log(np.exp(logits).sum()))

    return model


def top(logprobs: np.ndarray, count: int) -> dict[int, Logprob]:
    order = np.argsort(-logprobs, kind="stable")[:count]
    return {int(token): Logprob(float(logprobs[token]), rank) for rank, token in enumerate(order, 1)}


def run(model: Model, params: BeamSearchParams, *, eos: Sequence[int] = EOS) -> list[BeamSearchSequence]:
    beams = BeamSearch(PROMPT, params, eos)
    count = params.token_params(len(eos)).logprobs
    assert count is not None
    while not beams.is_done:
        beams.advance([top(model(beam.tokens), count) for beam in beams.beams])
    return beams.best()


def all_sequences(model: Model, params: BeamSearchParams, eos: Sequence[int]) -> list[tuple[float, list[int]]]:
    """(score, new tokens) of everything that the model can say, best first."""
    found: list[tuple[float, list[int]]] = []

    def walk(tokens: list[int], total: float) -> None:
        if tokens and (tokens[-1] in eos or len(tokens) == params.max_tokens):
            found.append((total / len(tokens) ** params.length_penalty, tokens))
            return
        for token, logprob in enumerate(model([*PROMPT, *tokens]).tolist()):
            walk([*tokens, token], total + logprob)

    walk([], 0.0)
    return sorted(found, key=lambda pair: -pair[0])


def plain_beam_search(model: Model, params: BeamSearchParams, eos: Sequence[int]) -> list[tuple[float, list[int]]]:
    """The textbook (vLLM's): 2 * width candidates a beam, always to the end, everything that ended is kept."""
    count = max(2 * params.beam_width, params.beam_width + len(eos))
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for _ in range(params.max_tokens):
        grown = [
            (total + float(logprob), [*tokens, token])
            for total, tokens in beams
            for logprob, token in sorted(zip(model([*PROMPT, *tokens]), range(VOCAB), strict=True), reverse=True)[
                :count
            ]
        ]
        done += [one for one in grown if one[1][-1] in eos]
        beams = sorted((one for one in grown if one[1][-1] not in eos), key=lambda one: -one[0])[: params.beam_width]
    scored = [(total / len(tokens) ** params.length_penalty, tokens) for total, tokens in [*done, *beams]]
    return sorted(scored, key=lambda pair: -pair[0])[: params.beam_width]


def new_tokens(sequences: Sequence[BeamSearchSequence]) -> list[list[int]]:
    assert all(sequence.tokens[: len(PROMPT)] == PROMPT for sequence in sequences)
    return [sequence.tokens[len(PROMPT) :] for sequence in sequences]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 6),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    ignore_eos=st.booleans(),
)
def test_search_equals_the_textbook(seed: int, width: int, max_tokens: int, penalty: float, ignore_eos: bool) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, length_penalty=penalty, ignore_eos=ignore_eos)
    model = toy_model(seed)
    expected = plain_beam_search(model, params, () if ignore_eos else EOS)
    found = run(model, params)
    assert new_tokens(found) == [tokens for _, tokens in expected]
    for sequence, (score, tokens) in zip(found, expected, strict=True):
        assert params.score(sequence.cum_logprob, len(tokens)) == pytest.approx(score)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_width_that_drops_nothing_finds_the_best_of_all(seed: int, penalty: float) -> None:
    params = BeamSearchParams(beam_width=VOCAB**3, max_tokens=4, length_penalty=penalty)
    expected = all_sequences(toy_model(seed), params, EOS)[: VOCAB**3]
    found = run(toy_model(seed), params)
    assert new_tokens(found) == [tokens for _, tokens in expected]


def test_width_1_is_greedy_when_nothing_ends() -> None:
    model, tokens = toy_model(7), list(PROMPT)
    for _ in range(6):
        tokens.append(int(model(tokens).argmax()))
    (found,) = run(model, BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    assert found.tokens == tokens
    assert (found.finish_reason, found.stop_reason) == ("length", None)


def test_sequence_says_how_likely_each_of_its_tokens_was_and_why_it_ended() -> None:
    for sequence in run(toy_model(1), BeamSearchParams(beam_width=3, max_tokens=4)):
        tokens = sequence.tokens[len(PROMPT) :]
        assert len(sequence.logprobs) == len(tokens)
        total = math.fsum(at[token].logprob for at, token in zip(sequence.logprobs, tokens, strict=True))
        assert sequence.cum_logprob == pytest.approx(total)
        ends = tokens[-1] in EOS
        assert (sequence.finish_reason, sequence.stop_reason) == (("stop", tokens[-1]) if ends else ("length", None))


def test_search_stops_when_nothing_can_get_better() -> None:
    """Ends that are all but certain: two steps are enough for two sequences, of a thousand that are allowed."""

    def model(tokens: Sequence[int]) -> np.ndarray:
        return np.asarray(np.log([0.98, 0.005, 0.005, 0.005, 0.005]))

    params = BeamSearchParams(beam_width=2, max_tokens=1000, length_penalty=0.0)
    assert len(run(model, params, eos=(0,))[-1].tokens) - len(PROMPT) == 2


# --- the driver


def config_of(**limits: Any) -> EngineConfig:
    model = ModelConfig(
        name="toy",
        path="",
        format="safetensors",
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        eos_token_ids=EOS,
    )
    return EngineConfig(
        model=model,
        group=GroupConfig(name="g", run_dir=""),
        scheduler=SchedulerConfig(max_model_len=20),
        limits=LimitsConfig(**limits),
    )


class ToyGroup:
    """Answers requests for one token from a toy model; the text "p" stands for PROMPT."""

    def __init__(self, model: Model) -> None:
        self.calls: list[list[Body]] = []
        self._model = model

    def run(self, bodies: list[Body]) -> list[RequestOutput]:
        self.calls.append(bodies)
        return [self._answer(body) for body in bodies]

    def _answer(self, body: Body) -> RequestOutput:
        params: SamplingParams = body["sampling_params"]
        assert (params.max_tokens, params.ignore_eos, params.is_greedy) == (1, True, True)
        tokens = PROMPT if body.get("prompt") == "p" else body["prompt_token_ids"]
        logprobs = top(self._model(tokens), params.logprobs or 0)
        output = CompletionOutput(0, "", [next(iter(logprobs))], "length", None, [logprobs])
        return RequestOutput("r", None, tokens, [output], True)


def find(group: ToyGroup, prompts: list[Body], params: BeamSearchParams, config: EngineConfig | None = None) -> Any:
    return search(prompts, params, config or config_of(), group.run, lambda ids: " ".join(map(str, ids)))


def test_driver_searches_for_all_prompts_side_by_side() -> None:
    model = toy_model(3)
    group = ToyGroup(model)
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.0)
    by_text, by_ids, other = find(
        group, [{"prompt": "p"}, {"prompt_token_ids": PROMPT}, {"prompt_token_ids": [2]}], params
    )
    assert [len(call) for call in itertools.islice(group.calls, 2)] == [3, 9]  # one call a step
    assert len(group.calls) <= 5
    assert by_text == by_ids != other
    assert new_tokens(by_text.sequences) == new_tokens(run(model, params))
    assert by_text.sequences[0].text == " ".join(map(str, by_text.sequences[0].tokens))
    assert find(group, [], params) == []


@pytest.mark.parametrize(
    ("params", "limits", "message"),
    [
        ({"beam_width": 4, "max_tokens": 18}, {}, r"^max_tokens: 18 new tokens after a prompt of 3 make 21, .* is 20$"),
        (
            {"beam_width": 4, "max_tokens": 2},
            {"max_logprobs": 7},
            r"^beam_width: 4 takes 8 logprobs a token, the limit \(max_logprobs\) is 7$",
        ),
    ],
)
def test_what_does_not_fit_the_group_is_refused_by_name(
    params: dict[str, Any], limits: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        find(ToyGroup(toy_model(0)), [{"prompt": "p"}], BeamSearchParams(**params), config_of(**limits))


def test_longest_search_that_fits_runs() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=17, ignore_eos=True)
    (found,) = find(ToyGroup(toy_model(0)), [{"prompt": "p"}], params)
    assert {len(sequence.tokens) for sequence in found.sequences} == {20}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("beam_width", (0, -1, True, 1.5, None)),
        ("max_tokens", (0, -1, True, 1.5, None)),
        ("temperature", (-0.1, math.nan, math.inf, True)),
        ("length_penalty", (math.nan, math.inf, 11, -11, True, "1")),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError, match=f"^{field}: "):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, field: value})


def test_parameters_have_the_defaults_of_vllm() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    assert msgspec.structs.astuple(params) == (2, 3, False, 0.0, 1.0)
