"""The native sampler gives the reference's tokens, by each instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from procengine.kernels.native import library
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures, native, reference
from procengine.kernels.sampling.randomness import add_gumbel_noise, row_keys
from tests.kernels.native.arrays import as_array, as_arrays
from tests.kernels.test_sampling import ALL, RANDOM, tensors

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the native library is not built")

DRAWS = 1200
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 900},  # more than there are blocks to tell how far to look
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 100, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 3.0, "top_p": 0.9},  # a nucleus of a thousand
]


@pytest.fixture(params=list(library.Isa), ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[library.Isa]:
    if request.param > library.best_isa():
        pytest.skip(f"this CPU has no {request.param.name}")
    with library.forced_isa(request.param):
        yield request.param


def each_isa() -> Iterator[library.Isa]:
    """Forces one after the other, for tests whose reference takes long."""
    for isa in library.Isa:
        if isa <= library.best_isa():
            with library.forced_isa(isa):
                yield isa


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = library.num_threads()
    library.set_num_threads(3)
    yield
    library.set_num_threads(before)


def sample(logits: Tensor, columns: SamplingColumns[Tensor], features: SamplingFeatures) -> Tensor:
    return torch.from_numpy(native.sample(as_array(logits), as_arrays(columns), features))


def assert_as_expected(
    logits: Tensor, columns: SamplingColumns[Tensor], features: SamplingFeatures, expected: Tensor
) -> None:
    """The tokens are these, but where float32 could have decided either way; of which there are few."""
    tokens, uncertain = native.draw(as_array(logits), as_arrays(columns), features)
    is_same = torch.from_numpy(tokens) == expected
    assert bool((is_same | torch.from_numpy(uncertain)).all())
    assert int(uncertain.sum()) <= 1 + len(tokens) // 20


def rows_of_logits(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Like a model's: a few likely tokens and a long tail."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * 2.5 - 3


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_draws_are_those_of_the_reference(parameters: dict[str, float]) -> None:
    logits = rows_of_logits(4, 2000).repeat(DRAWS // 4, 1)
    batch = tensors(DRAWS, **parameters)  # type: ignore[arg-type]
    expected = reference.sample(logits, batch, ALL)
    for _ in each_isa():
        assert_as_expected(logits, batch, ALL, expected)


def test_rows_of_all_kinds_in_one_batch() -> None:
    parameters = [*FILTERS, {"temperature": 0.0}, {"temperature": 1e-6}]
    columns = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    lists = {name: [row.get(name, value) for row in parameters] for name, value in columns.items()}
    batch = tensors(len(parameters), **lists, seed=list(range(len(parameters))))  # type: ignore[arg-type]
    logits = rows_of_logits(len(parameters), 20000)
    expected = reference.sample(logits, batch, ALL)
    for isa in each_isa():
        assert_as_expected(logits, batch, ALL, expected)
        for row in torch.arange(len(parameters)).split(1):
            alone = sample(logits[row], reference.select_rows(batch, row), ALL)
            assert torch.equal(alone, sample(logits, batch, ALL)[row]), (isa, row)


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 63, 64, 65, 1000, 1023, 1025])
def test_any_size_of_vocabulary(vocab_size: int, isa: library.Isa) -> None:
    logits = rows_of_logits(40, vocab_size)
    none = SamplingFeatures.NONE
    assert torch.equal(sample(logits, tensors(40), none), reference.sample(logits, tensors(40), none))
    for batch in (
        tensors(40),
        tensors(40, top_k=3),
        tensors(40, top_p=0.6),
        tensors(40, min_p=0.3, top_k=40, top_p=0.99),
    ):
        assert_as_expected(logits, batch, ALL, reference.sample(logits, batch, ALL))


def test_the_lowest_id_wins_among_equals(isa: library.Isa) -> None:
    logits = torch.zeros(1, 3000)
    logits[0, [70, 1500, 2999]] = 1.0
    assert sample(logits, tensors(1), SamplingFeatures.NONE).tolist() == [70]
    assert sample(logits - 5e30, tensors(1), SamplingFeatures.NONE).tolist() == [0]  # all are rounded to one


@pytest.mark.parametrize("parameters", [{"top_k": 4}, {"top_p": 0.55}, {"top_k": 30, "top_p": 0.9}], ids=str)
def test_filters_keep_the_lowest_ids_among_equals(parameters: dict[str, float], isa: library.Isa) -> None:
    logits = torch.randint(0, 3, (DRAWS, 200)).float()
    batch = tensors(DRAWS, **parameters)  # type: ignore[arg-type]
    assert_as_expected(logits, batch, ALL, reference.sample(logits, batch, ALL))


@pytest.mark.parametrize("features", [SamplingFeatures.NONE, RANDOM, ALL])
def test_masked_broken_and_endless_logits(features: SamplingFeatures, isa: library.Isa) -> None:
    logits = rows_of_logits(8, 300)
    logits[0, ::2] = -torch.inf
    logits[1] = -torch.inf
    logits[1, 77] = -3.0
    logits[2] = -torch.inf
    logits[3, 17] = torch.inf
    logits[4] *= 1e4
    logits[5, [5, 9]] = torch.inf
    logits[6, 250] = torch.nan
    logits[7, [3, 200]] = torch.nan
    batch = tensors(8, top_k=20, top_p=0.9, min_p=0.01)
    found, expected = sample(logits, batch, features), reference.sample(logits, batch, features)
    assert torch.equal(found[:6], expected[:6])
    assert found[6:].tolist() == [250, 3]  # no distribution: what is broken shows, whatever is asked for


def test_features_that_no_row_uses_are_not_looked_at() -> None:
    logits = rows_of_logits(50, 300)
    batch = tensors(50, top_k=2, top_p=0.1, min_p=0.9)
    assert_as_expected(logits, batch, RANDOM, reference.sample(logits, batch, RANDOM))
    assert not torch.equal(sample(logits, batch, RANDOM), sample(logits, batch, ALL))


def test_extreme_seeds_and_positions(isa: library.Isa) -> None:
    ends = [-(2**63), -1, 0, 1, 2**31, 2**32 - 1, 2**63 - 1]
    logits = rows_of_logits(1, 3000).repeat(len(ends), 1)
    for position in (0, 1, 2**31, 2**40):
        batch = tensors(len(ends), seed=ends, position=position)
        assert_as_expected(logits, batch, RANDOM, reference.sample(logits, batch, RANDOM))


def test_hardly_a_draw_is_uncertain(isa: library.Isa) -> None:
    logits = as_array(rows_of_logits(8, 2000).repeat(200, 1))
    assert not native.draw(logits, as_arrays(tensors(1600, top_k=50)), ALL)[1].any()
    assert not native.draw(logits, as_arrays(tensors(1600)), RANDOM)[1].any()


def test_a_draw_too_close_for_float32_is_reported_and_decided(isa: library.Isa) -> None:
    """The runner-up is lifted to the winner's score, but for less than float32 can tell apart."""
    logits = torch.zeros(1, 2)
    batch = tensors(1, position=5)
    noise = add_gumbel_noise(torch.zeros(1, 2), row_keys(batch.seeds, batch.positions))
    logits[0, 0] = noise[0, 1] - noise[0, 0]
    tokens, uncertain = native.draw(as_array(logits), as_arrays(batch), RANDOM)
    assert uncertain.tolist() == [True]
    assert tokens[0] in (0, 1)
    logits[0, 1] += 1e-4
    tokens, uncertain = native.draw(as_array(logits), as_arrays(batch), RANDOM)
    assert (tokens.tolist(), uncertain.tolist()) == ([1], [False])


def test_logits_may_be_a_slice_of_wider_rows() -> None:
    wide = rows_of_logits(30, 500)
    batch = tensors(30, top_p=0.9)
    assert_as_expected(wide[:, :401], batch, ALL, reference.sample(wide[:, :401], batch, ALL))
    assert sample(wide[:0], tensors(0), ALL).shape == (0,)
