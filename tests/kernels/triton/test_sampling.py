"""Triton sampling against the reference: the same token for the same row, whatever filters it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from procengine.kernels.logits import reference as logits_reference
from procengine.kernels.logits import triton as logits_kernels
from procengine.kernels.sampling import SamplingFeatures, reference
from procengine.kernels.sampling import triton as sampling
from procengine.kernels.sampling.logprobs import gather_logprobs
from procengine.kernels.sampling.triton_logprobs import gather_logprobs as triton_logprobs
from tests.kernels.test_sampling import ALL, FILTERS, LOGITS, RANDOM, filtered, tensors

ROWS = 12  # a row takes the interpreter up to a tenth of a second


@pytest.mark.parametrize("vocab_size", [1, 17, 1024, 1500])
def test_greedy_rows_take_the_lowest_of_equal_maxima(vocab_size: int) -> None:
    logits = torch.randint(-3, 3, (9, vocab_size)).float()
    for features in (SamplingFeatures.NONE, RANDOM, ALL):
        out = sampling.sample(logits, tensors(9, temperature=0.0), features)
        assert torch.equal(out.long(), logits.argmax(-1))


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 1400},
        {"top_k": 1_000_000},
        {"top_p": 1e-9},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"min_p": 0.05, "top_k": 20},
        {"min_p": 0.3, "top_k": 200},
        {"temperature": 1.7, "top_k": 50, "top_p": 0.8},
        {"temperature": 0.7, "min_p": 0.02, "top_k": 30, "top_p": 0.9},
    ],
    ids=str,
)
def test_the_same_token_as_the_reference(parameters: dict[str, float]) -> None:
    logits = torch.randn(ROWS, 1500, generator=torch.Generator().manual_seed(1)) * 3
    batch = tensors(ROWS, seed=[977 * row - 30000 for row in range(ROWS)], **parameters)  # type: ignore[arg-type]
    assert torch.equal(sampling.sample(logits, batch, ALL), reference.sample(logits, batch, ALL))


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_what_a_filter_keeps_among_equals(parameters: dict[str, float]) -> None:
    rows = 24
    batch = tensors(rows, **parameters)  # type: ignore[arg-type]
    tokens = sampling.sample(LOGITS.expand(rows, -1), batch, ALL)
    assert torch.equal(tokens, reference.sample(LOGITS.expand(rows, -1), batch, ALL))
    allowed = set(filtered(**parameters).nonzero().squeeze(1).tolist())  # type: ignore[arg-type]
    assert set(tokens.tolist()) <= allowed


def test_rows_of_all_kinds_in_one_batch() -> None:
    rows = 30
    logits = torch.randn(rows, 700, generator=torch.Generator().manual_seed(2)) * 3
    logits[::7] = logits[::7].round()  # equals, also at the bounds
    batch = tensors(
        rows,
        temperature=[(0.0, 0.7, 1.0, 3.0)[row % 4] for row in range(rows)],
        top_k=[(0, 5, 200)[row % 3] for row in range(rows)],
        top_p=[(1.0, 0.9, 0.99, 0.5, 0.9999)[row % 5] for row in range(rows)],
        min_p=[(0.0, 0.1)[row % 2] for row in range(rows)],
    )
    assert torch.equal(sampling.sample(logits, batch, ALL), reference.sample(logits, batch, ALL))


def test_temperatures_and_filters_may_be_columns_of_one_table() -> None:
    """As a runner has them: temperature, top_p and min_p of a slot lie side by side."""
    rows = 6
    logits = torch.randn(rows, 300, generator=torch.Generator().manual_seed(4)) * 3
    table = torch.tensor([[0.3, 0.5, 0.1], [1.5, 0.9, 0], [0.7, 1, 0], [0.0, 0.3, 0.2], [1, 1, 0], [0.9, 0.8, 0.05]])
    temperature, top_p, min_p = table.unbind(1)
    apart = tensors(rows, temperature=temperature.tolist(), top_p=top_p.tolist(), min_p=min_p.tolist())
    batch = replace(apart, temperature=temperature, top_p=top_p, min_p=min_p)
    assert torch.equal(sampling.sample(logits, batch, ALL), reference.sample(logits, apart, ALL))


def test_a_filter_that_the_batch_does_not_name_is_not_applied() -> None:
    logits = torch.randn(ROWS, 300, generator=torch.Generator().manual_seed(5))
    batch = tensors(ROWS, top_k=3, top_p=0.2, min_p=0.5)
    for features in (RANDOM, RANDOM | SamplingFeatures.TOP_K, RANDOM | SamplingFeatures.MIN_P):
        assert torch.equal(sampling.sample(logits, batch, features), reference.sample(logits, batch, features))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((20, 6), -torch.inf)
    logits[:, 2], logits[:, 4] = 0.0, 1.0
    for features, batch in ((RANDOM, tensors(20)), (ALL, tensors(20, top_p=0.999, top_k=5, min_p=0.01))):
        assert set(sampling.sample(logits, batch, features).tolist()) == {2, 4}


@pytest.mark.parametrize("vocab_size", [7, 1030])
def test_penalties(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, vocab_size, generator=generator) * 4
    counts = torch.randint(0, 3, (9, vocab_size), generator=generator, dtype=torch.int32)
    mask = torch.rand(9, vocab_size, generator=generator) < 0.3
    values = torch.tensor([[1.0, 0, 0], [1.3, 0, 0], [1, 0.5, 0], [1, 0, 0.7], [0.8, -1, 2], [2, 0.1, 0.1]])
    rows, slots = torch.tensor([0, 7, 2, 3, 5, 1]), torch.tensor([8, 0, 3, 1, 7, 2])
    before, expected = logits.clone(), logits.clone()
    logits_reference.apply_penalties(expected, rows, counts, mask, slots, values)
    logits_kernels.apply_penalties(logits, rows, counts, mask, slots, values)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[[0, 4, 6]], before[[0, 4, 6]])  # no penalty, and not named


@pytest.mark.parametrize(("vocab_size", "num_words"), [(1, 1), (33, 2), (1100, 35), (1100, 3), (64, 5)])
def test_bitmask(vocab_size: int, num_words: int) -> None:
    logits = torch.randn(5, vocab_size)
    words = torch.randint(-(2**31), 2**31 - 1, (3, num_words), dtype=torch.int32)
    rows = torch.tensor([4, 0, 2])
    expected = logits.clone()
    logits_reference.apply_token_bitmask(expected, rows, words)
    logits_kernels.apply_token_bitmask(logits, rows, words)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs(num_top: int) -> None:
    logits = torch.randn(6, 1100) * 5
    logits[0, :4] = -torch.inf
    token_ids = torch.tensor([2, 0, 5, 1099, 7, 1024], dtype=torch.int32)
    ids, logprobs, ranks = triton_logprobs(logits, token_ids, num_top)
    expected_ids, expected_logprobs, expected_ranks = gather_logprobs(logits, token_ids, num_top)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(ranks, expected_ranks)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
