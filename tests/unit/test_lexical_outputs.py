"""Weights of tokens become one weight for each that says something."""

from __future__ import annotations

import numpy as np

from procengine.lexical_outputs import LexicalOutputs, weight_pairs
from procengine.messages import Register
from procengine.step_output import EmbedOutput, PassTimes, WorkerIdentity
from procengine.tokenizer import Tokenizer
from tests.tiny_encoders import tiny_wordpiece


def pairs(token_ids: list[int], *weights: float) -> list[list[float]]:
    data = weight_pairs(token_ids, np.array(weights, "<f4").tobytes(), {0, 2, 3})
    return np.frombuffer(data, "<f4").reshape(-1, 2).tolist()


def test_equal_tokens_have_the_largest_weight() -> None:
    assert pairs([9, 7, 9, 7], 0.25, 0.5, 0.75, 0.125) == [[7, 0.5], [9, 0.75]]


def test_special_tokens_and_those_of_weight_zero_are_left_out() -> None:
    assert pairs([2, 7, 8, 3], 1, 0, 0.5, 1) == [[8, 0.5]]
    assert pairs([2, 3], 1, 1) == []


def test_the_largest_token_ids_are_exact() -> None:
    assert pairs([2**24 - 1, 2**24 - 3], 1, 1) == [[2**24 - 3, 1], [2**24 - 1, 1]]


def test_sequences_of_a_step_get_their_own_weights() -> None:
    outputs = LexicalOutputs(Tokenizer(tiny_wordpiece()))
    for key, token_ids in enumerate([[2, 9, 3], [2, 9, 8, 9, 3], [2, 3]]):
        outputs.register(Register(key, b"c", f"r{key}", 0, "embed_sparse", token_ids, 0))
    weights = np.array([1, 0.5, 1, 1, 0.25, 0.75, 0.5, 1, 1, 1], np.float32)
    step = EmbedOutput(
        *(0, np.arange(3, dtype=np.int64), lambda: weights, PassTimes(0, 0, 0, 0)),
        workflow="embed_sparse",
        counts=np.array([3, 5, 2], np.int32),
    )
    outputs.take_result(*step.to_message(WorkerIdentity(0, 0), weights))
    items = outputs.take_items().items_by_client[b"c"]
    found = [np.frombuffer(item.data, "<f4").tolist() for item in items]  # type: ignore[union-attr]
    assert found == [[9, 0.5], [8, 0.75, 9, 0.5], []]
