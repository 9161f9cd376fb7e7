"""Sampling: distributions by chi-square, filters by enumeration, randomness by its address."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from procengine.kernels import host_reads
from procengine.kernels.native import library
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures
from procengine.kernels.sampling import native as native_sampling
from procengine.kernels.sampling.logprobs import gather_logprobs
from procengine.kernels.sampling.randomness import add_gumbel_noise, row_keys
from procengine.kernels.sampling.reference import sample

ALL = SamplingFeatures.RANDOM | SamplingFeatures.TOP_K | SamplingFeatures.TOP_P | SamplingFeatures.MIN_P
RANDOM = SamplingFeatures.RANDOM
DRAWS = 200_000
LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, 0.3, -2.0, 1.7])


def tensors(
    rows: int,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    seed: int | list[int] = 7,
    position: int | None = None,
) -> SamplingColumns[Tensor]:
    def column(value: float | list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype) if isinstance(value, list) else torch.full((rows,), value, dtype=dtype)

    return SamplingColumns(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seeds=column(seed, torch.int64),
        positions=torch.arange(rows) if position is None else torch.full((rows,), position),
    )


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities[probabilities > 0] * counts.sum()
    return float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())


def filtered(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The distribution by the definitions, one token at a time, for LOGITS."""
    p = (LOGITS.double() / temperature).softmax(0)
    p = torch.where(p >= min_p * p.max(), p, 0)
    ranking = sorted(range(len(p)), key=lambda i: (-float(p[i]), i))
    if top_k:
        p[ranking[top_k:]] = 0
    p /= p.sum()
    mass, kept = 0.0, []
    for i in ranking:
        if mass >= top_p:
            break
        kept.append(i)
        mass += float(p[i])
    p[[i for i in ranking if i not in kept]] = 0
    return p / p.sum()


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_k": 4},  # the fourth place is shared by ids 3 and 4: the lower one stays
    {"top_p": 0.7},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 5, "top_p": 0.8},
]


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(parameters: dict[str, float]) -> None:
    batch = tensors(DRAWS, **parameters)  # type: ignore[arg-type]
    tokens = sample(LOGITS.expand(DRAWS, -1), batch, ALL)
    counts = torch.bincount(tokens, minlength=len(LOGITS)).double()
    probabilities = filtered(**parameters)  # type: ignore[arg-type]
    assert tokens.dtype == torch.int32
    assert torch.equal(counts > 0, probabilities > 0)
    assert chi_square(counts, probabilities) < 27.9  # 6 degrees of freedom, p = 0.0001; seeds are fixed


def test_seeds_are_as_good_as_positions() -> None:
    batch = tensors(DRAWS, seed=list(range(DRAWS)), position=3)
    counts = torch.bincount(sample(LOGITS.expand(DRAWS, -1), batch, RANDOM), minlength=len(LOGITS)).double()
    assert chi_square(counts, LOGITS.double().softmax(0)) < 27.9


def mixed_batch(rows: int, generator: torch.Generator) -> tuple[Tensor, SamplingColumns[Tensor]]:
    """Rows of all kinds, greedy ones and filters that are off included."""
    return torch.randn(rows, 3000, generator=generator) * 3, tensors(
        rows,
        temperature=[(0.0, 0.7, 1.0, 3.0)[row % 4] for row in range(rows)],
        top_k=[(0, 5, 2000)[row % 3] for row in range(rows)],
        top_p=[(1.0, 0.9, 0.99, 0.5, 0.9999)[row % 5] for row in range(rows)],
        min_p=[(0.0, 0.1)[row % 2] for row in range(rows)],
        seed=[row * 977 - 30000 for row in range(rows)],
    )


def test_a_token_depends_on_its_row_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, batch = mixed_batch(64, generator)
    together = sample(logits, batch, ALL)
    names = SamplingColumns.__dataclass_fields__
    order = torch.randperm(64, generator=generator)
    for part in (*order.split(1), *order.split(7), order):
        some = SamplingColumns(**{name: getattr(batch, name)[part] for name in names})
        assert torch.equal(sample(logits[part], some, ALL), together[part])


def test_the_way_taken_on_a_device_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, batch = mixed_batch(240, torch.Generator().manual_seed(2))
    expected = sample(logits, batch, ALL)
    monkeypatch.setattr(host_reads, "are_free", lambda tensor: False)
    assert torch.equal(sample(logits, batch, ALL), expected)


def test_a_batch_without_random_rows_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    for features in (SamplingFeatures.NONE, RANDOM):
        assert sample(logits, tensors(2, temperature=0.0), features).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-38, 1e-20, 9e-6])
def test_colder_than_the_limit_is_greedy(temperature: float) -> None:
    logits = torch.randn(50, 11) * 50
    out = sample(logits, tensors(50, temperature=temperature, top_p=0.3, top_k=2, min_p=0.5), ALL)
    assert torch.equal(out.long(), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1.1e-5, 1e-3, 100.0, 3e38])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
def test_extreme_temperatures_give_tokens_of_the_vocabulary(temperature: float, scale: float) -> None:
    logits = torch.randn(40, 13) * scale
    out = sample(logits, tensors(40, temperature=temperature, top_p=0.9, top_k=9, min_p=0.01), ALL)
    assert int(out.min()) >= 0
    assert int(out.max()) < 13


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((5000, 6), -torch.inf)
    logits[:, 2] = 0.0
    logits[:, 4] = 1.0
    assert set(sample(logits, tensors(5000), RANDOM).tolist()) == {2, 4}


def test_rounding_of_logits_hardly_ever_changes_a_draw() -> None:
    """Batches of other shapes round differently: the same request must give the same tokens in all of them."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 5000, generator=generator) * 3
    noisy = logits + torch.randn(logits.shape, generator=generator) * 2e-5
    num_changed = 0
    for position in range(10):
        batch = tensors(64, position=position, seed=list(range(64)))
        num_changed += int((sample(logits, batch, RANDOM) != sample(noisy, batch, RANDOM)).sum())
    assert num_changed <= 1


@pytest.mark.parametrize("top_k", [7, 8, 1_000_000])
def test_top_k_of_the_whole_vocabulary_is_off(top_k: int) -> None:
    rows = LOGITS.expand(500, -1)
    assert torch.equal(sample(rows, tensors(500, top_k=top_k), ALL), sample(rows, tensors(500), RANDOM))


def test_top_k_one_and_tiny_top_p_are_greedy_even_among_equals() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 4.0]]).expand(300, -1)
    assert set(sample(logits, tensors(300, top_k=1), ALL).tolist()) == {1}
    assert set(sample(logits, tensors(300, top_p=1e-9), ALL).tolist()) == {1}


@pytest.mark.parametrize("top_p", [0.5, 0.97])
def test_a_nucleus_wider_than_the_first_guess(top_p: float) -> None:
    vocab_size = 5000
    logits = torch.linspace(1.0, 0.0, vocab_size)[torch.randperm(vocab_size)]
    tokens = sample(logits.expand(2500, -1), tensors(2500, top_p=top_p), ALL)
    probabilities, ranking = logits.double().softmax(0).sort(descending=True)
    width = int((probabilities.cumsum(0) < top_p).sum()) + 1
    assert width > 1024
    assert set(tokens.tolist()) <= set(ranking[:width].tolist())
    assert len(set(tokens.tolist())) > 1024


def splitmix64(state: int) -> int:
    """Vigna's splitmix64.c, in Python's unbounded integers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64])
@pytest.mark.parametrize("position", [0, 1, 131071])
def test_row_keys_are_splitmix64_addressed_by_position(seed: int, position: int) -> None:
    state = (splitmix64(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64
    key = row_keys(torch.tensor([seed]), torch.tensor([position]))
    assert key.dtype == torch.int64
    assert key.item() % 2**64 == splitmix64(state)


def lowbias32(z: int) -> int:
    """Wellons' lowbias32, in Python's unbounded integers."""
    mask = (1 << 32) - 1
    z = ((z ^ (z >> 16)) * 0x7FEB352D) & mask
    z = ((z ^ (z >> 15)) * 0x846CA68B) & mask
    return z ^ (z >> 16)


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_noise_is_gumbel_of_a_hash_of_key_and_token(key: int) -> None:
    noise = add_gumbel_noise(torch.zeros(1, 200), torch.tensor([key]))[0]
    for token in range(200):
        z = lowbias32(lowbias32(key % 2**32 ^ token * 0x9E3779B9 % 2**32) ^ key % 2**64 >> 32)
        w = ((z & 0x7FFFFFFF) + 0.5) / 2**31
        assert noise[token].item() == pytest.approx(-math.log(-math.log1p(-w)), rel=1e-4, abs=1e-4)


def test_noise_has_the_moments_of_the_gumbel_distribution() -> None:
    noise = add_gumbel_noise(torch.zeros(64, 20_000), row_keys(torch.arange(64), torch.zeros(64).long())).double()
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    assert torch.corrcoef(noise[:8]).fill_diagonal_(0).abs().max().item() < 0.03
    assert torch.corrcoef(torch.stack((noise[0, 1:], noise[0, :-1])))[0, 1].abs().item() < 0.03


def test_splitmix64_reference_value() -> None:
    assert splitmix64(1234567) == 6457827717110365317  # the first output published for this seed


Gather = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


def native_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    ids, logprobs, ranks = native_sampling.gather_logprobs(logits.numpy(), token_ids.numpy(), num_top)
    return torch.from_numpy(ids), torch.from_numpy(logprobs), torch.from_numpy(ranks)


@pytest.fixture(params=["torch", "native"])
def gather(request: pytest.FixtureRequest) -> Gather:
    if request.param == "torch":
        return gather_logprobs
    if not library.is_available():
        pytest.skip("the native library is not built")
    return native_logprobs


def test_logprobs_are_of_the_raw_logits_with_the_chosen_token_first(gather: Gather) -> None:
    logits = LOGITS.expand(2, -1)
    ids, logprobs, ranks = gather(logits, torch.tensor([4, 2], dtype=torch.int32), 5)
    assert (ids.dtype, logprobs.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    assert ids.tolist() == [[4, 2, 6, 0, 3, 4], [2, 2, 6, 0, 3, 4]]
    torch.testing.assert_close(logprobs, LOGITS.double().log_softmax(0)[ids.long()].float())
    assert ranks.tolist() == [4, 1]


def test_logprobs_without_a_top_and_with_more_than_the_vocabulary(gather: Gather) -> None:
    ids, logprobs, ranks = gather(LOGITS[None], torch.tensor([5]), 0)
    assert (ids.tolist(), tuple(logprobs.shape), ranks.tolist()) == ([[5]], (1, 1), [7])
    ids, logprobs, _ = gather(LOGITS[None], torch.tensor([5]), 20)
    assert ids.shape == logprobs.shape == (1, 8)


def test_equal_logprobs_come_lowest_id_first(gather: Gather) -> None:
    logits = torch.zeros(1, 500)
    logits[0, 100:] = -1.0
    ids, _, _ = gather(logits, torch.tensor([0]), 1)
    assert ids[0, 1] < 100
    logits[0, [40, 7, 300]] = 2.0
    assert gather(logits, torch.tensor([7]), 3)[0].tolist() == [[7, 7, 40, 300]]


def test_logprobs_are_finite_even_where_a_logit_is_not(gather: Gather) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-torch.inf, 1e30, 5.0]])
    assert bool(gather(logits, torch.tensor([1, 0]), 2)[1].isfinite().all())


@pytest.mark.skipif(not library.is_available(), reason="the native library is not built")
@pytest.mark.parametrize("isa", list(library.Isa))
def test_native_logprobs_are_those_of_torch(isa: library.Isa) -> None:
    if isa > library.best_isa():
        pytest.skip(f"this CPU has no {isa.name}")
    generator = torch.Generator().manual_seed(3)
    for vocab_size, num_top in ((1, 1), (31, 5), (1000, 0), (1000, 20), (20000, 300)):
        logits = torch.randn(7, vocab_size, generator=generator) * 6
        logits[3] = (logits[3] * 100).round() / 100  # a few equals
        chosen = torch.randint(vocab_size, (7,), generator=generator, dtype=torch.int32)
        expected = gather_logprobs(logits, chosen, num_top)
        with library.forced_isa(isa):
            found = native_logprobs(logits, chosen, num_top)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=4e-6)
        assert torch.equal(found[2], expected[2])


@pytest.mark.skipif(not library.is_available(), reason="the native library is not built")
def test_native_logprobs_of_logits_that_say_nothing_are_in_order_all_the_same() -> None:
    for value in (torch.nan, -torch.inf, torch.inf):
        ids, logprobs, ranks = native_logprobs(torch.full((1, 70), value), torch.tensor([5]), 3)
        assert (ids.tolist(), ranks.tolist()) == ([[5, 0, 1, 2]], [1])
        assert bool(logprobs.isfinite().all())
