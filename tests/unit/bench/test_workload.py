"""Requests of random token ids."""

from __future__ import annotations

import re

import numpy as np
import pytest

from procengine.bench.workload import (
    BenchRequest,
    Lengths,
    check_fits,
    misfit,
    prefix_requests,
    random_requests,
    requests_of_lengths,
)
from procengine.errors import ConfigError


def ids_of(requests: list[BenchRequest]) -> list[list[int]]:
    assert all(isinstance(request.prompt, list) for request in requests)
    return [list(map(int, request.prompt)) for request in requests]  # type: ignore[arg-type]


def test_random_requests_are_the_same_for_the_same_seed() -> None:
    requests = random_requests(3, Lengths(5, 7), 100, seed=1)
    assert requests == random_requests(3, Lengths(5, 7), 100, seed=1) != random_requests(3, Lengths(5, 7), 100, seed=2)
    assert [(request.num_prompt_tokens, request.max_tokens) for request in requests] == [(5, 7)] * 3
    assert {token_id for ids in ids_of(random_requests(50, Lengths(50, 1), 8, seed=0)) for token_id in ids} == set(
        range(8)
    )


def test_lengths_spread_by_the_range_ratio() -> None:
    inputs, outputs = Lengths(100, 10, 0.5).draw(np.random.default_rng(0), 5000)
    assert set(inputs) == set(range(50, 151)) and set(outputs) == set(range(5, 16))
    assert np.mean(inputs) == pytest.approx(100, abs=2)
    assert min(Lengths(1, 1, 0.9).draw(np.random.default_rng(0), 100)[0]) == 1, "never nothing"


def test_prefixes_are_shared_in_turn_and_what_follows_is_not() -> None:
    ids = ids_of(prefix_requests(6, Lengths(4, 2), prefix_len=8, num_prefixes=3, vocab_size=1000, seed=0))
    assert [len(one) for one in ids] == [12] * 6
    beginnings = [tuple(one[:8]) for one in ids]
    assert beginnings[:3] == beginnings[3:] and len(set(beginnings)) == 3
    assert len({tuple(one[8:]) for one in ids}) == 6


def test_given_lengths_are_kept() -> None:
    requests = requests_of_lengths([(3, 9), (1, 2)], ["x line 2", "x line 3"], 100, seed=0)
    assert [(r.num_prompt_tokens, r.max_tokens, r.origin) for r in requests] == [(3, 9, "x line 2"), (1, 2, "x line 3")]


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (BenchRequest([1, 2, 3], 7, "here"), None),
        (BenchRequest("a text of any length", 7, "here"), None),
        (BenchRequest([{"role": "user", "content": "x"}], 7, "here"), None),
        (
            BenchRequest([1, 2, 3], 8, "here"),
            "here: 3 tokens of prompt and 8 of answer make 11, the context limit (max_model_len) is 10",
        ),
        (BenchRequest([], 1, "here"), "here: the prompt must have at least 1 token, got 0"),
        (BenchRequest([1], 0, "here"), "here: the answer must have at least 1 token, got 0"),
    ],
)
def test_request_that_does_not_fit_is_named(request_: BenchRequest, problem: str | None) -> None:
    assert misfit(request_, max_model_len=10) == problem
    if problem is None:
        check_fits([request_], 10)
    else:
        with pytest.raises(ConfigError, match=re.escape(problem)):
            check_fits([request_], 10)


def test_nothing_is_no_work_load() -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        check_fits([], 10)
