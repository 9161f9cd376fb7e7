"""`EmbedOutputs`: from the vectors of embed steps to the messages of clients. The output process's part of `embed`.

Owns: who asked for which vector. Never does: touch a socket.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.messages import Embedding, EmbedResult, Register
from procengine.step_payload import join_int64

__all__ = ["EmbedOutputs"]


class EmbedOutputs:
    """All running `embed` requests of the group."""

    def __init__(self) -> None:
        self._registers: dict[int, Register] = {}
        self._early: dict[int, bytes] = {}
        self._newest_key = -1

    @property
    def num_unfinished(self) -> int:
        """Requests registered and not ended."""
        return len(self._registers)

    def register(self, message: Register) -> tuple[bytes, Embedding] | None:
        """Take up a request; its message, if the vector was here first."""
        self._registers[message.key] = message
        self._newest_key = max(self._newest_key, message.key)
        early = self._early.pop(message.key, None)
        return None if early is None else self._answer(message.key, early)

    def take_result(self, header: EmbedResult, payload: NDArray[np.int32]) -> list[tuple[bytes, Embedding]]:
        """Messages for all rows of a step, with their clients. Rows of ended requests are dropped."""
        num_words = header.sizes[0]
        keys = join_int64(payload[:num_words]).tolist()
        vectors = payload[num_words:].reshape(header.num_rows, -1)  # float32 bits: they go out as bytes
        answers: list[tuple[bytes, Embedding]] = []
        for key, vector in zip(keys, vectors, strict=True):
            if key in self._registers:
                answers.append(self._answer(key, vector.tobytes()))
            elif key > self._newest_key:
                self._early[key] = vector.tobytes()
        return answers

    def finish(self, key: int, finish_reason: str, error: str | None = None) -> tuple[bytes, list[Embedding]] | None:
        """End a request from outside (abort, error); None if it has ended already."""
        register = self._registers.pop(key, None)
        if register is None:
            return None
        message = Embedding(register.request_id, b"", register.prompt_token_ids, finish_reason, error)
        return register.client, [message]

    def keys_of_client(self, client: bytes) -> list[int]:
        """Running requests of one client."""
        return [key for key, register in self._registers.items() if register.client == client]

    def all_keys(self) -> list[int]:
        """Running requests."""
        return list(self._registers)

    def _answer(self, key: int, data: bytes) -> tuple[bytes, Embedding]:
        register = self._registers.pop(key)
        return register.client, Embedding(register.request_id, data, register.prompt_token_ids)
