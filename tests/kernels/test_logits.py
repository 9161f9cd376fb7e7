"""Changes to logits: against transformers' processors, against plain Python, and through the sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from procengine.kernels import host_reads
from procengine.kernels.logits import native, reference
from procengine.kernels.native import library
from procengine.kernels.sampling.reference import sample
from tests.kernels.test_sampling import ALL, DRAWS, chi_square, tensors

INF = torch.inf
OPERATIONS = ("add_rows", "apply_penalties", "apply_token_bitmask", "ban_sequences", "ban_tokens_before")


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """With what a model can give besides plain numbers: both zeros and -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * 4
    special = torch.randint(0, 12, (rows, vocab_size), generator=generator)
    return logits.masked_fill(special == 0, 0.0).masked_fill(special == 1, -0.0).masked_fill(special == 2, -INF)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def counts_of(histories: list[list[int]], vocab_size: int) -> Tensor:
    return torch.stack(
        [torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size) for ids in histories]
    )


def penalised(logits: Tensor, prompts: list[list[int]], outputs: list[list[int]], **values: list[float]) -> Tensor:
    """`apply_penalties` on a copy, out of token lists; repetition, frequency and presence for each row."""
    rows, vocab_size = logits.shape
    off = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
    penalties = torch.tensor([values.get(name, [value] * rows) for name, value in off.items()]).T
    # Tables of more slots than there are rows, in another order.
    slots = torch.arange(rows).flip(0) + 1
    counts = torch.full((rows + 2, vocab_size), 7, dtype=torch.int32)
    counts[slots] = counts_of(outputs, vocab_size).to(torch.int32)
    mask = torch.ones((rows + 2, vocab_size), dtype=torch.bool)
    mask[slots] = counts_of(prompts, vocab_size) > 0
    changed = torch.cat((logits[:1], logits))
    ops.apply_penalties(changed, torch.arange(rows) + 1, counts, mask, slots, penalties)
    assert bits_equal(changed[0], logits[0]), "a row that is not named"
    return changed[1:]


class Operations:
    """Those of the backend under test, on tensors: numpy arrays share their memory."""

    def __init__(self) -> None:
        self.is_native = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        assert name in OPERATIONS
        if not self.is_native:
            operation: Callable[..., None] = getattr(reference, name)
            return operation
        return lambda *tensors: getattr(native, name)(*(tensor.numpy() for tensor in tensors))


ops = Operations()


@pytest.fixture(params=["host", "device", "native"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of an op: the reference's on the host, that of fixed shapes which it takes on a device, and native."""
    if request.param == "native" and not library.is_available():
        pytest.skip("the native library is not built")
    monkeypatch.setattr(ops, "is_native", request.param == "native")
    monkeypatch.setattr(host_reads, "are_free", lambda tensor: request.param != "device")


PROMPTS = [[1, 2, 2, 6], [], [0, 3], [4]]
OUTPUTS = [[2, 5, 5, 5], [1], [], [6, 6, 0]]


@pytest.mark.parametrize("penalty", [1.3, 0.5, 2.0, 1e-3, 1e3])
@pytest.mark.parametrize("vocab_size", [7, 33])
def test_repetition_is_that_of_transformers_over_prompt_and_output(penalty: float, vocab_size: int) -> None:
    logits = random_logits(4, vocab_size, seed=vocab_size)
    changed = penalised(logits, PROMPTS, OUTPUTS, repetition=[penalty] * 4)
    oracle = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    for row, history in enumerate(p + o for p, o in zip(PROMPTS, OUTPUTS, strict=True)):
        assert bits_equal(changed[row], oracle(torch.tensor([history]), logits[row : row + 1].clone())[0])


def test_frequency_and_presence_are_of_the_output_alone() -> None:
    logits = random_logits(4, 9, seed=3)
    frequency, presence = [0.5, -1.0, 2.0, 0.25], [0.7, 2.0, -2.0, 0.0]
    changed = penalised(logits, PROMPTS, OUTPUTS, frequency=frequency, presence=presence)
    for row, output in enumerate(OUTPUTS):
        for token in range(9):
            count = output.count(token)
            expected = float(logits[row, token]) - frequency[row] * count - presence[row] * (count > 0)
            assert float(changed[row, token]) == pytest.approx(expected, abs=1e-6)


def test_repetition_comes_before_the_others() -> None:
    changed = penalised(torch.tensor([[6.0, -6.0, 6.0]]), [[0]], [[1]], repetition=[2.0], frequency=[1.0])
    assert changed.tolist() == [[3.0, -13.0, 6.0]]


def test_rows_without_a_penalty_keep_their_bits_beside_rows_with_one() -> None:
    logits = random_logits(4, 50, seed=5)
    changed = penalised(logits, PROMPTS, OUTPUTS, repetition=[1.0, 1.3, 1.0, 1.0], presence=[0.0, 0.0, 0.0, 1.0])
    assert bits_equal(changed[[0, 2]], logits[[0, 2]])
    assert not bits_equal(changed[[1, 3]], logits[[1, 3]])


def test_bias_is_that_of_transformers() -> None:
    logits = random_logits(3, 20, seed=6)
    changed, table = logits.clone(), torch.zeros(5, 20)
    table[4, [19, 4]] = torch.tensor([5.0, -100.0])
    table[1, 0] = 0.5
    ops.add_rows(changed, torch.tensor([0, 2]), table, torch.tensor([4, 1]))
    ids = torch.tensor([[1]])
    first = transformers.SequenceBiasLogitsProcessor([[[19], 5.0], [[4], -100.0]])(ids, logits[:1])
    last = transformers.SequenceBiasLogitsProcessor([[[0], 0.5]])(ids, logits[2:])
    torch.testing.assert_close(changed, torch.cat((first, logits[1:2], last)), rtol=0, atol=0)
    assert bits_equal(changed[1], logits[1])


def words_of(allowed: list[set[int]], num_words: int) -> Tensor:
    """The bits, by Python's unbounded integers."""
    packed = [sum(1 << token for token in tokens).to_bytes(num_words * 4, "little") for tokens in allowed]
    return torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.int32).view(len(allowed), num_words)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 95, 1000])
@pytest.mark.parametrize("num_words", [1, 2, 3, 31, 32, 33])
def test_a_bitmask_forbids_what_it_does_not_name(vocab_size: int, num_words: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    draws = torch.rand(3, num_words * 32, generator=generator) < 0.4
    draws[:, [31, -1]] = True  # sign bits
    allowed = [set(row.nonzero().flatten().tolist()) for row in draws]
    logits = torch.randn(5, vocab_size, generator=generator)
    changed = logits.clone()
    ops.apply_token_bitmask(changed, torch.tensor([4, 0, 2]), words_of(allowed, num_words))
    for row, tokens in zip((4, 0, 2), allowed, strict=True):
        expected = [float(logits[row, i]) if i in tokens else -INF for i in range(vocab_size)]
        assert changed[row].tolist() == expected
    assert bits_equal(changed[[1, 3]], logits[[1, 3]])


def test_a_bitmask_may_be_a_view_of_a_larger_one() -> None:
    words = words_of([{0, 1, 40, 70}, {2, 33, 99}], 4)
    logits = torch.zeros(2, 64)
    ops.apply_token_bitmask(logits, torch.tensor([0, 1]), words[:, 1:3])
    assert [(row == 0).nonzero().flatten().tolist() for row in logits] == [[8, 38], [1]]


def padded(rows: list[list[int]], width: int, pad: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([[pad] * (width - len(row)) + row for row in rows], dtype=dtype).view(len(rows), width)


@pytest.mark.parametrize("history", [[], [1], [3, 1], [5, 3, 1], [1, 5, 3], [2, 2], [0, 1, 2, 3, 4, 5]])
def test_bans_are_those_of_transformers(history: list[int]) -> None:
    bad_words = [[4], [1, 2], [3, 1, 2], [5, 3, 1, 0], [2, 2], [7, 1, 6], [3, 1, 5], [3, 4]]
    logits = torch.randn(3, 9)
    changed = logits.clone()
    width, num_words = 3, len(bad_words)
    ops.ban_sequences(
        changed,
        torch.full((num_words,), 1),
        padded([history[-width:]] * num_words, width, -2),
        padded([word[:-1] for word in bad_words], width, -1),
        torch.tensor([word[-1] for word in bad_words]),
    )
    ids = torch.tensor([history], dtype=torch.int64).view(1, -1)
    expected = transformers.NoBadWordsLogitsProcessor(bad_words)(ids, logits[1:2])
    assert torch.equal(changed[1:2], expected)
    assert bits_equal(changed[[0, 2]], logits[[0, 2]])


def test_the_first_token_of_an_empty_history_is_no_wildcard() -> None:
    logits = torch.zeros(1, 4)
    ops.ban_sequences(logits, torch.tensor([0]), torch.tensor([[-2]]), torch.tensor([[0]]), torch.tensor([3]))
    assert logits.tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_one_match_among_entries_for_the_same_token_bans_it() -> None:
    for order in ([7, 1], [1, 7]):
        logits = torch.zeros(2, 4)
        prefixes = torch.tensor([[token] for token in order])
        ops.ban_sequences(logits, torch.tensor([1, 1]), torch.tensor([[7], [7]]), prefixes, torch.tensor([2, 2]))
        assert logits.tolist() == [[0.0] * 4, [0.0, 0.0, -INF, 0.0]]


def test_a_ban_that_does_not_match_keeps_every_bit() -> None:
    logits = random_logits(1, 40, seed=9)
    changed = logits.clone()
    entries = torch.arange(40)
    ops.ban_sequences(changed, torch.zeros_like(entries), torch.full((40, 2), 5), torch.full((40, 2), 6), entries)
    ops.ban_tokens_before(changed, torch.tensor([0]), entries.view(1, 40), torch.tensor([False]))
    assert bits_equal(changed, logits)


@pytest.mark.parametrize("num_generated", [0, 2, 3, 10])
def test_min_tokens_is_that_of_transformers(num_generated: int) -> None:
    logits = torch.randn(4, 11)
    changed = logits.clone()
    rows, stop_ids = torch.tensor([3, 1]), torch.tensor([[2, 10, -1], [5, -1, 11]])
    ops.ban_tokens_before(changed, rows, stop_ids, torch.tensor([num_generated < 3, False]))
    oracle = transformers.MinNewTokensLengthLogitsProcessor(4, 3, torch.tensor([2, 10]))
    assert torch.equal(changed[3:], oracle(torch.zeros(1, 4 + num_generated), logits[3:]))
    assert bits_equal(changed[:3], logits[:3])


def test_ids_outside_the_vocabulary_reach_no_other_row() -> None:
    logits = torch.zeros(3, 5)
    ops.ban_tokens_before(logits, torch.tensor([1]), torch.tensor([[-1, 5, 9, -1]]), torch.tensor([True]))
    assert torch.equal(logits, torch.zeros(3, 5))


NOTHING: dict[str, Callable[[Tensor], None]] = {
    "bias": lambda x: ops.add_rows(x, torch.empty(0).long(), torch.ones(3, 40), torch.empty(0).long()),
    "bitmask": lambda x: ops.apply_token_bitmask(x, torch.empty(0).long(), torch.empty(0, 2).int()),
    "sequences": lambda x: ops.ban_sequences(
        x, torch.empty(0).long(), torch.empty(0, 3).int(), torch.empty(0, 3).int(), torch.empty(0).long()
    ),
    "min_tokens": lambda x: ops.ban_tokens_before(x, torch.arange(2), torch.empty(2, 0).long(), torch.ones(2).bool()),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_no_entries_change_nothing(kind: str) -> None:
    logits = random_logits(2, 40, seed=11)
    changed = logits.clone()
    NOTHING[kind](changed)
    assert bits_equal(changed, logits)


ROW = torch.tensor([1.0, -0.5, 2.0, 0.3, 0.3, -2.0, 1.7])
OUTPUT, PROMPT = [2, 2, 6], [0, 1]
BIAS = {3: 1.5, 5: 2.5}


def python_logits() -> list[float]:
    """ROW after penalties, bias and a ban, one number at a time: repetition 1.4, frequency 0.3, presence 0.2."""
    changed = []
    for token, logit in enumerate(ROW.tolist()):
        factor = 1.0 if token not in PROMPT + OUTPUT else 1 / 1.4 if logit > 0 else 1.4
        subtracted = 0.3 * OUTPUT.count(token) + 0.2 * (token in OUTPUT)
        changed.append(-INF if token == 4 else logit * factor - subtracted + BIAS.get(token, 0.0))
    return changed


def python_filtered(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    p = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(0)
    p = torch.where(p >= min_p * p.max(), p, 0)
    values, order = p.sort(descending=True, stable=True)
    values[top_k or len(values) :] = 0
    values /= values.sum()
    values[values.cumsum(0) - values >= top_p] = 0
    return torch.zeros_like(p).index_copy_(0, order, values / values.sum())


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_follow_the_changed_logits(parameters: dict[str, Any]) -> None:
    logits = penalised(ROW[None], [PROMPT], [OUTPUT], repetition=[1.4], frequency=[0.3], presence=[0.2])
    table = torch.zeros(1, len(ROW))
    table[0, [*BIAS]] = torch.tensor([*BIAS.values()])
    ops.add_rows(logits, torch.tensor([0]), table, torch.tensor([0]))
    ops.apply_token_bitmask(logits, torch.tensor([0]), words_of([{0, 1, 2, 3, 5, 6}], 1))
    torch.testing.assert_close(logits[0], torch.tensor(python_logits()))
    tokens = sample(logits.expand(DRAWS, -1), tensors(DRAWS, **parameters), ALL)
    counts = torch.bincount(tokens, minlength=len(ROW)).double()
    expected = python_filtered(
        python_logits(), **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **parameters}
    )
    assert torch.equal(counts > 0, expected > 0)
    assert chi_square(counts, expected) < 27.9  # 6 degrees of freedom or fewer, p = 0.0001; seeds are fixed
