"""From sampling parameters to feature bits, seeds, rules and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from procengine import row_features as bits
from procengine.config import LimitsConfig
from procengine.errors import InvalidRequestError
from procengine.request import RowRules
from procengine.sampling_params import SamplingParams
from procengine.structured.spec import StructuredOutputs
from procengine.workflows.prompt import ModelFacts
from procengine.workflows.row_sampling import check_params, row_rules, row_sampling

VOCAB = 1000


def features(**params: Any) -> int:
    return row_sampling(SamplingParams(**params), 0, 0, VOCAB).features


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, 0),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, 0),  # greedy: nothing is drawn
        ({"presence_penalty": 0.1}, bits.PENALTIES),
        ({"presence_penalty": -0.1}, bits.PENALTIES),
        ({"frequency_penalty": 0.1}, bits.PENALTIES),
        ({"repetition_penalty": 1.1}, bits.PENALTIES),
        ({"repetition_penalty": 0.9}, bits.PENALTIES),
        ({"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0}, 0),
        ({"logit_bias": {5: 1.0}}, bits.BIAS),
        ({"logit_bias": {}}, 0),
        ({"allowed_token_ids": (5,)}, bits.BIAS),
        ({"min_tokens": 1}, bits.EARLY_STOPS),
        ({"bad_words": ("x",)}, bits.BAD_WORDS),
        ({"bad_words": ()}, 0),
        ({"structured_outputs": StructuredOutputs(regex="a")}, bits.GRAMMAR),
        ({"min_tokens": 2, "logit_bias": {5: 1.0}, "bad_words": ("x",)}, bits.EARLY_STOPS | bits.BIAS | bits.BAD_WORDS),
        ({"stop": "x", "logprobs": 3, "prompt_logprobs": 2, "max_tokens": 4, "ignore_eos": True, "seed": 5}, 0),
    ],
)
def test_each_parameter_switches_on_its_own_feature(params: dict[str, Any], expected: int) -> None:
    assert features(temperature=0, **params) == expected
    drawn = features(temperature=1, **params)
    assert drawn & ~bits.SAMPLING == expected
    assert drawn & bits.RANDOM


def test_filters_have_a_bit_each_and_none_when_they_filter_nothing() -> None:
    assert features(top_k=5) == bits.RANDOM | bits.TOP_K
    assert features(top_p=0.5) == bits.RANDOM | bits.TOP_P
    assert features(min_p=0.5) == bits.RANDOM | bits.MIN_P
    for top_k in (-1, 0, VOCAB, VOCAB + 1, 10**12):
        assert features(top_k=top_k, top_p=1.0, min_p=0.0) == bits.RANDOM


def test_bits_are_different_and_the_lowest_are_the_samplers() -> None:
    single = [value for name in bits.__all__ if (value := getattr(bits, name)).bit_count() == 1]
    assert len(set(single)) == len(single) == 10
    assert bits.SAMPLING == 15
    assert bits.NEEDS_HISTORY & ~bits.NEEDS_LOGITS_STATE == 0
    assert bits.NEEDS_LOGITS_STATE & (bits.SAMPLING | bits.GRAMMAR) == 0


@pytest.mark.parametrize(
    ("seed", "drawn", "index", "expected"),
    [
        (None, 99, 0, 99),
        (None, 99, 4, 103),
        (7, 99, 2, 9),
        (0, 99, 0, 0),
        (2**63 - 1, 0, 0, 2**63 - 1),
        (2**63 - 1, 0, 1, -(2**63)),
        (2**63 - 1, 0, 3, -(2**63) + 2),
        (-(2**63), 0, 1, -(2**63) + 1),
        (None, 2**63 - 1, 2, -(2**63) + 1),
    ],
)
def test_choices_have_consecutive_seeds_that_wrap_around(
    seed: int | None, drawn: int, index: int, expected: int
) -> None:
    found = row_sampling(SamplingParams(seed=seed), drawn, index, VOCAB).seed
    assert found == expected
    assert np.array([found], np.int64)[0] == expected


def test_values_reach_the_row() -> None:
    params = SamplingParams(
        temperature=0.5, repetition_penalty=1.5, frequency_penalty=-0.5, presence_penalty=0.25, logprobs=4
    )
    row = row_sampling(params, 1, 0, VOCAB)
    assert (row.repetition_penalty, row.frequency_penalty, row.presence_penalty) == (1.5, -0.5, 0.25)
    assert (row.temperature, row.num_logprobs) == (0.5, 4)


def test_rules_of_a_plain_request_are_none() -> None:
    assert row_rules(SamplingParams(), (2,), ()) == RowRules()


def test_rules_hold_what_was_asked_for() -> None:
    params = SamplingParams(logit_bias={5: 1.0, 6: -2.0}, allowed_token_ids=(6, 5), min_tokens=2)
    rules = row_rules(params, (2, 0), ((8, 9),))
    assert rules == RowRules(((5, 1.0), (6, -2.0)), (6, 5), (2, 0), ((8, 9),))


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"n": 5}, "n: at most 4 choices are allowed, got 5"),
        ({"stop": ("a", "b", "c")}, "stop: at most 2 stop strings are allowed, got 3"),
        ({"stop": ("é" * 6,)}, "stop: at most 10 bytes in all are allowed, got 12"),
        ({"stop_token_ids": (1, 2, 3)}, "stop_token_ids: at most 2 ids are allowed, got 3"),
        ({"bad_words": ("a", "b", "c")}, "bad_words: at most 2 words are allowed, got 3"),
        ({"bad_words": ("é" * 6,)}, "bad_words: at most 10 bytes in all are allowed, got 12"),
        ({"logit_bias": {1: 0.0, 2: 0.0, 3: 0.0}}, "logit_bias: at most 2 entries are allowed, got 3"),
        ({"logprobs": 6}, "logprobs: at most 5 alternatives are allowed, got 6"),
        ({"prompt_logprobs": 6}, "prompt_logprobs: at most 5 alternatives are allowed, got 6"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias: {VOCAB} is not a token of this model; ids go from 0 to 999"),
        (
            {"allowed_token_ids": (0, 5000)},
            "allowed_token_ids: 5000 is not a token of this model; ids go from 0 to 999",
        ),
        (
            {"allowed_token_ids": (0,) * (VOCAB + 1)},
            "allowed_token_ids: at most 1000 ids (the vocabulary) are allowed, got 1001",
        ),
    ],
)
def test_smp_06_limits_are_named_and_kept(params: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_params(SamplingParams(**params), FACTS)
    assert str(caught.value) == text


FACTS = ModelFacts(
    VOCAB,
    100,
    100,
    100,
    (2,),
    LimitsConfig(
        max_n=4,
        max_stop_strings=2,
        max_stop_bytes=10,
        max_stop_token_ids=2,
        max_bad_words=2,
        max_logit_bias=2,
        max_logprobs=5,
    ),
)


def test_limits_themselves_are_allowed() -> None:
    check_params(
        SamplingParams(
            n=4,
            stop=("aaaaa", "bbbbb"),
            stop_token_ids=(0, 999),
            bad_words=("aaaaa", "bbbbb"),
            logit_bias={0: 100.0, 999: -100.0},
            logprobs=5,
            prompt_logprobs=5,
            allowed_token_ids=tuple(range(VOCAB)),
        ),
        FACTS,
    )
