"""`EmbedOutputs`: from the vectors of embed steps to the messages of clients. The output process's part of `embed`.

Owns: who asked for which vector. Never does: touch a socket.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from procengine.messages import Embedding, EmbedResult, Register, RequestTimes
from procengine.postprocessor import EndedRequest, Item, NoteKey, TakenItems
from procengine.step_payload import join_int64
from procengine.tokenizer import Tokenizer

__all__ = ["EmbedOutputs"]


class EmbedOutputs:
    """All running `embed` requests of the group."""

    def __init__(self, _tokenizer: Tokenizer) -> None:
        self._registers: dict[int, Register] = {}
        self._early: dict[int, bytes] = {}  # vectors that overtook their request's Register
        self._newest_key = -1
        self._answers: list[tuple[Register, bytes]] = []
        self._admitted_ns: dict[int, int] = {}
        self._ended: list[EndedRequest] = []

    @property
    def num_unfinished(self) -> int:
        """Requests registered and not ended."""
        return len(self._registers)

    def register(self, message: Register) -> list[tuple[int, int]]:
        """Take up a request; one that is known already stays as it is. There are no gaps."""
        self._registers.setdefault(message.key, message)
        self._newest_key = max(self._newest_key, message.key)
        early = self._early.pop(message.key, None)
        if early is not None:
            self._answer(message.key, early)
        if self._early:  # keys come in order: those below were of requests that ended before we heard of any
            self._early = {key: data for key, data in self._early.items() if key > self._newest_key}
        return []

    def admit(self, key: int, num_cached_tokens: int, num_preemptions: int = 0, sent_ns: int = 0) -> None:
        """A request is in a step that was sent then. There is no cache."""
        if key in self._registers:
            self._admitted_ns[key] = sent_ns

    def take_result(self, header: EmbedResult, payload: NDArray[np.int32]) -> list[tuple[int, int]]:
        """Take in the vectors of a step; those of ended requests are dropped. There are no gaps."""
        if not header.num_rows:
            return []  # a piece of a sequence that goes on
        num_words, num_numbers, _ = header.sizes
        keys = join_int64(payload[:num_words]).tolist()
        numbers = payload[num_words : num_words + num_numbers]  # float32 bits: they go out as bytes
        counts = payload[num_words + num_numbers :]
        vectors = np.split(numbers, np.cumsum(counts)[:-1]) if counts.size else numbers.reshape(header.num_rows, -1)
        for key, vector in zip(keys, vectors, strict=True):
            if key in self._registers:
                self._answer(key, vector.tobytes())
            elif key > self._newest_key:
                self._early[key] = vector.tobytes()
        return []

    def replay(self, key: int, position: int, token_ids: list[int]) -> list[tuple[int, int]]:
        """Nothing: a vector has no parts to miss."""
        return []

    def take_items(self, received_ns: int = 0, note_key: NoteKey | None = None) -> TakenItems:
        """Everything that is new since the last call, as messages; the newest result came at `received_ns`."""
        taken = TakenItems()
        answers, self._answers = self._answers, []
        for register, data in answers:
            times = self._end(register, "stop", received_ns)
            message = Embedding(register.request_id, data, register.prompt_token_ids, times=times, key=register.key)
            taken.add(register.client, message)
        taken.ended, self._ended = self._ended, []
        return taken

    def finish(self, key: int, finish_reason: str, error: str | None = None) -> tuple[bytes, list[Item]] | None:
        """End a request from outside (abort, error): its client and last message; None if it has ended already."""
        register = self._registers.pop(key, None)
        if register is None:
            return None
        times = self._end(register, finish_reason, 0)
        message = Embedding(
            register.request_id, b"", register.prompt_token_ids, finish_reason, error, times, register.key
        )
        return register.client, [message]

    def keys_of_client(self, client: bytes) -> list[int]:
        """Running requests of one client."""
        return [key for key, register in self._registers.items() if register.client == client]

    def clients(self) -> Iterator[tuple[bytes, bool]]:
        """The client of each running request, and whether that has had its first step."""
        return ((register.client, key in self._admitted_ns) for key, register in self._registers.items())

    def all_keys(self) -> list[int]:
        """Running requests."""
        return list(self._registers)

    def _answer(self, key: int, data: bytes) -> None:
        register = self._registers.pop(key)
        self._answers.append((register, self._data_of(register, data)))

    def _data_of(self, register: Register, data: bytes) -> bytes:
        """What the client gets for the float32 numbers that the worker sent."""
        return data

    def _end(self, register: Register, finish_reason: str, received_ns: int) -> RequestTimes:
        times = RequestTimes(
            register.client_sent_ns,
            register.received_ns,
            register.prepared_ns,
            self._admitted_ns.pop(register.key, 0),
            received_ns,
            received_ns,
        )
        num_prompt_tokens = len(register.prompt_token_ids)
        self._ended.append(EndedRequest(register.key, finish_reason, times, num_prompt_tokens, 0, 0))
        return times
