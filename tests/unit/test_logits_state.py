"""What slots remember and do to their logits, against plain Python, over random lives of slots."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from procengine.arrays import Arrays
from procengine.host_arrays import HostArrays
from procengine.kernels.native import library
from procengine.logits_state import LogitsState
from procengine.request import Request, RowRules, RowSampling
from procengine.row_features import BAD_WORDS, BIAS, EARLY_STOPS, GRAMMAR, PENALTIES, SAMPLING
from procengine.slot_lists import slot_lists
from procengine.torch_arrays import TorchArrays

VOCAB, SLOTS = 23, 4
INF = float("inf")
RULES = (PENALTIES, BIAS, EARLY_STOPS, BAD_WORDS)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tables this small are slower on several."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def float32(value: float) -> float:
    return float(np.float32(value))


@dataclass
class Life:
    """One request, with the oracle of its logits."""

    request: Request
    tokens: list[int] = field(default_factory=list)

    @property
    def features(self) -> int:
        return self.request.sampling.features

    @property
    def penalties(self) -> list[float]:
        sampling = self.request.sampling
        return [sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty]

    def expected(self, logits: list[float]) -> list[float]:
        """By the definitions: bias and allowed tokens, bans, then penalties."""
        rules, num_prompt = self.request.rules, self.request.prompt_token_ids.size
        out = list(logits)
        if self.features & BIAS:
            for token, bias in rules.logit_bias:
                out[token] += float32(bias)
            if rules.allowed_token_ids is not None:
                out = [value if token in rules.allowed_token_ids else -INF for token, value in enumerate(out)]
        if self.features & BAD_WORDS:
            for word in rules.bad_words:
                if self.tokens[len(self.tokens) - len(word) + 1 :] == list(word[:-1]) or len(word) == 1:
                    out[word[-1]] = -INF
        if self.features & EARLY_STOPS and len(self.tokens) < self.request.min_position:
            for token in rules.early_stop_ids:
                out[token] = -INF
        if self.features & PENALTIES:
            repetition, frequency, presence = self.penalties
            output = self.tokens[num_prompt:]
            for token in set(self.tokens):
                out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
                out[token] -= frequency * output.count(token) + presence * (token in output)
        return out


def random_life(rng: random.Random, key: int) -> Life:
    features = sum(bit for bit in RULES if rng.random() < 0.5) | rng.choice((0, SAMPLING, GRAMMAR))
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
    words = [tuple(rng.choice(prompt) for _ in range(rng.randint(1, 4))) for _ in range(3)]
    if rng.random() < 0.2:
        words.append(tuple(prompt * 2)[:12])  # longer than what is kept for others
    allowed = tuple(rng.sample(range(VOCAB), 9)) if rng.random() < 0.5 else None
    request = Request(
        key,
        b"",
        str(key),
        np.array(prompt, np.int32),
        100,
        RowSampling(
            0,
            features=features,
            repetition_penalty=rng.choice((1.0, 1.5, 0.5)),
            frequency_penalty=rng.choice((0.0, 0.5, -1.0)),
            presence_penalty=rng.choice((0.0, 0.25, -1.5)),
        ),
        min_position=len(prompt) + rng.randint(0, 6),
        rules=RowRules(
            tuple((token, rng.uniform(-100, 100)) for token in rng.sample(range(VOCAB), 3)),
            allowed,
            tuple(rng.sample(range(VOCAB), rng.choice((0, 1, 5, 12)))),
            tuple(words),
        ),
    )
    return Life(request, list(prompt))


KINDS: list[Arrays[Any]] = [TorchArrays(torch.device("cpu")), *([HostArrays()] if library.is_available() else [])]


@pytest.fixture(params=KINDS, ids=lambda arrays: type(arrays).__name__, autouse=True)
def arrays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Arrays[Any]:
    monkeypatch.setattr(Worker, "arrays", request.param)
    kind: Arrays[Any] = request.param
    return kind


class Worker:
    """A state and the lives in its slots."""

    arrays: Arrays[Any] = KINDS[0]

    def __init__(self) -> None:
        self.state = LogitsState(SLOTS, VOCAB, self.arrays)
        self.lives: dict[int, Life] = {}

    def place(self, placed: dict[int, Life]) -> None:
        for slot, life in placed.items():
            life.request.slot = slot
            life.request.token_ids = np.array(life.tokens, np.int32)
        self.lives |= placed
        self.state.place(
            np.array(list(placed), np.int32),
            np.array([life.features for life in placed.values()], np.int32),
            np.array([life.penalties for life in placed.values()], np.float32),
        )
        self.state.take_lists(slot_lists([life.request for life in placed.values()]))

    def step(self, slots: list[int], logits: Tensor, drawn: list[int]) -> Tensor:
        rows = np.array(slots, np.int32)
        positions = np.array([len(self.lives[slot].tokens) for slot in slots], np.int32)
        given = self.arrays.send(logits.numpy())
        adjusted = self.state.adjust(given, rows, positions)
        assert adjusted is given
        self.state.record(rows, self.arrays.send(np.array(drawn, np.int32)))
        for slot, token in zip(slots, drawn, strict=True):
            self.lives[slot].tokens.append(token)
        return torch.as_tensor(adjusted)


@pytest.mark.parametrize("seed", range(25))
def test_random_lives_of_slots_follow_the_definitions(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    worker, parked, num_keys = Worker(), [], 0
    for _ in range(60):
        for slot in [slot for slot in worker.lives if rng.random() < 0.1]:  # ended or preempted
            life = worker.lives.pop(slot)
            if rng.random() < 0.6:
                parked.append(life)
        vacant = [slot for slot in range(SLOTS) if slot not in worker.lives and rng.random() < 0.5]
        placed = {}
        for slot in vacant:
            if parked and rng.random() < 0.7:
                placed[slot] = parked.pop(rng.randrange(len(parked)))
            else:
                placed[slot] = random_life(rng, num_keys)
                num_keys += 1
        if placed:
            worker.place(placed)
        slots = [slot for slot in worker.lives if rng.random() < 0.8]
        rng.shuffle(slots)
        if not slots:
            continue
        logits = torch.randn(len(slots), VOCAB, generator=generator) * 3
        before = logits.clone()
        expected = [worker.lives[slot].expected(row) for slot, row in zip(slots, before.tolist(), strict=True)]
        is_plain = [not worker.lives[slot].features & sum(RULES) for slot in slots]
        drawn = [rng.choice((*worker.lives[slot].tokens, rng.randrange(VOCAB))) for slot in slots]
        adjusted = worker.step(slots, logits, drawn)
        torch.testing.assert_close(adjusted, torch.tensor(expected), rtol=1e-5, atol=1e-4)
        for row, plain in enumerate(is_plain):
            if plain:
                assert torch.equal(adjusted[row].view(torch.int32), before[row].view(torch.int32)), "bit for bit"


def life_of(features: int, prompt: list[int], output: tuple[int, ...] = (), **values: Any) -> Life:
    rules = {name: values.pop(name) for name in ("bad_words", "early_stop_ids", "logit_bias") if name in values}
    min_position = values.pop("min_position", 0)
    request = Request(
        0,
        b"",
        "0",
        np.array(prompt, np.int32),
        99,
        RowSampling(0, features=features, **values),
        rules=RowRules(**rules),
    )
    request.min_position = min_position
    return Life(request, [*prompt, *output])


def test_a_batch_in_which_nobody_uses_anything_is_given_back_as_it_is() -> None:
    worker = Worker()
    worker.place({0: life_of(SAMPLING, [1]), 1: life_of(GRAMMAR, [2])})
    logits = torch.randn(2, VOCAB)
    same = logits.clone()
    assert torch.equal(worker.step([0, 1], logits, [3, 3]), same)


def test_counts_are_rebuilt_when_a_row_comes_back_elsewhere() -> None:
    stays, returns = Worker(), Worker()
    for worker in (stays, returns):
        worker.place({0: life_of(PENALTIES, [1, 2], frequency_penalty=0.5, repetition_penalty=2.0)})
        worker.step([0], torch.zeros(1, VOCAB), [5])
        worker.step([0], torch.zeros(1, VOCAB), [5])
    returns.place({0: life_of(PENALTIES, [5, 5, 5], presence_penalty=1.0), 3: returns.lives[0]})
    logits = torch.randn(1, VOCAB)
    assert torch.equal(stays.step([0], logits.clone(), [7]), returns.step([3], logits.clone(), [7]))
    assert torch.equal(stays.step([0], logits.clone(), [7]), returns.step([3], logits.clone(), [7]))


@pytest.mark.parametrize("num_in_prompt", range(4))
def test_bad_word_across_prompt_history_and_new_tokens_is_banned_at_its_last(num_in_prompt: int) -> None:
    word = (4, 5, 6, 7)
    worker = Worker()
    worker.place({2: life_of(BAD_WORDS, [1, *word[:num_in_prompt]], bad_words=(word,))})
    for token in word[num_in_prompt:3]:
        assert math.isfinite(float(worker.step([2], torch.zeros(1, VOCAB), [token])[0, 7]))
    banned = worker.step([2], torch.zeros(1, VOCAB), [8])
    assert banned[0].isinf().nonzero().flatten().tolist() == [7]
    assert not worker.step([2], torch.zeros(1, VOCAB), [7]).isinf().any()


def test_longer_word_of_a_later_row_leaves_what_earlier_rows_remember() -> None:
    worker = Worker()
    worker.place({0: life_of(BAD_WORDS, [1, 2, 3], bad_words=((2, 3, 9),))})
    long_word = tuple(range(12))
    worker.place({1: life_of(BAD_WORDS, list(long_word[:11]), bad_words=(long_word,))})
    adjusted = worker.step([1, 0], torch.zeros(2, VOCAB), [20, 20])
    assert [row.isinf().nonzero().flatten().tolist() for row in adjusted] == [[11], [9]]


def test_early_stops_end_at_their_position() -> None:
    worker = Worker()
    worker.place({0: life_of(EARLY_STOPS, [1, 2], early_stop_ids=(3, 4), min_position=4)})
    for count in range(4):
        adjusted = worker.step([0], torch.zeros(1, VOCAB), [9])
        assert adjusted[0].isinf().nonzero().flatten().tolist() == ([3, 4] if count < 2 else [])


def test_slot_keeps_nothing_of_its_holder_before() -> None:
    worker = Worker()
    every = PENALTIES | BIAS | BAD_WORDS | EARLY_STOPS
    worker.place(
        {
            0: life_of(
                every,
                [1, 2],
                (3,),
                bad_words=((3, 4), (5,)),
                early_stop_ids=(6, 7),
                min_position=50,
                logit_bias=((8, 5.0),),
                repetition_penalty=2.0,
            )
        }
    )
    worker.step([0], torch.zeros(1, VOCAB), [3])
    new = life_of(every, [9], bad_words=((10,),), logit_bias=((11, 2.0),), frequency_penalty=1.0)
    worker.place({0: new})
    logits = torch.randn(1, VOCAB)
    expected = new.expected(logits[0].tolist())
    torch.testing.assert_close(worker.step([0], logits, [9])[0], torch.tensor(expected))
