"""Vectors go to who asked, once."""

from __future__ import annotations

import numpy as np

from procengine.embed_outputs import EmbedOutputs
from procengine.messages import Embedding, EmbedResult, Register, RequestTimes
from procengine.step_output import EmbedOutput, PassTimes, WorkerIdentity
from tests.tiny_tokenizers import byte_level


def outputs(*keys: int) -> EmbedOutputs:
    made = EmbedOutputs(byte_level())
    for key in keys:
        made.register(register(key))
    return made


def register(key: int) -> Register:
    return Register(key, b"c%d" % (key % 2), f"r{key}", 0, "embed", [key, key], 0)


def result(*keys: int) -> tuple[EmbedResult, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    vectors = np.array([[key, key + 0.5, -1] for key in keys], np.float32)
    output = EmbedOutput(0, np.array(keys, np.int64), lambda: vectors, PassTimes(0, 0, 0, 0))
    return output.to_message(WorkerIdentity(0, 0), vectors)


def answer(key: int) -> Embedding:
    vector = np.array([key, key + 0.5, -1], "<f4").tobytes()
    return Embedding(f"r{key}", vector, [key, key], times=RequestTimes(), key=key)


def test_every_vector_goes_to_its_client_in_one_message_each() -> None:
    embed = outputs(0, 1, 2)
    assert embed.take_result(*result(2, 0, 1)) == []
    assert embed.take_items().items_by_client == {b"c0": [answer(2), answer(0)], b"c1": [answer(1)]}
    assert embed.take_items().items_by_client == {}
    assert embed.num_unfinished == 0


def test_repeated_vector_is_dropped() -> None:
    embed = outputs(0)
    embed.take_result(*result(0))
    embed.take_result(*result(0))
    assert embed.take_items().items_by_client == {b"c0": [answer(0)]}


def test_vector_before_its_register_is_kept() -> None:
    embed = outputs(0)
    embed.take_result(*result(0, 1, 2))
    assert embed.take_items().items_by_client == {b"c0": [answer(0)]}
    embed.register(register(1))
    embed.register(register(2))
    assert embed.take_items().items_by_client == {b"c1": [answer(1)], b"c0": [answer(2)]}


def test_early_vectors_of_requests_that_nobody_registers_are_not_kept_for_ever() -> None:
    embed = outputs()
    embed.take_result(*result(0, 1, 2))  # to a new process, which hears only of what has not ended
    embed.register(register(1))
    assert embed.take_items().items_by_client == {b"c1": [answer(1)]}
    embed.register(register(0))
    embed.register(register(2))
    assert embed.take_items().items_by_client == {b"c0": [answer(2)]}


def test_a_request_is_registered_once() -> None:
    embed = outputs(0)
    embed.register(register(0))
    embed.take_result(*result(0))
    assert embed.take_items().items_by_client == {b"c0": [answer(0)]}
    assert embed.num_unfinished == 0


def test_ended_request_gets_one_terminal_message_and_its_vector_is_dropped() -> None:
    embed = outputs(0, 3)
    ended = Embedding("r0", b"", [0, 0], "error", "it broke", RequestTimes(), 0)
    assert embed.finish(0, "error", "it broke") == (b"c0", [ended])
    assert embed.finish(0, "abort") is None
    embed.take_result(*result(0))
    embed.register(register(4))
    assert embed.take_items().items_by_client == {}


def test_requests_are_found_by_client() -> None:
    embed = outputs(0, 1, 2)
    assert embed.keys_of_client(b"c0") == [0, 2]
    assert embed.all_keys() == [0, 1, 2]


def test_a_piece_of_a_sequence_brings_nothing() -> None:
    embed = outputs(0)
    output = EmbedOutput(0, np.empty(0, np.int64), lambda: np.empty(0, np.float32), PassTimes(0, 0, 0, 0))
    header, payload = output.to_message(WorkerIdentity(0, 0), output.wait())
    assert embed.take_result(header, payload) == []
    assert embed.take_items().items_by_client == {}
    assert embed.num_unfinished == 1
