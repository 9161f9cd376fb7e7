"""`LexicalOutputs`: from weights of tokens to the messages of clients. The output process's part of `embed_sparse`.

Owns: that equal tokens have one weight, the largest, and special ones none. Never does: touch a socket.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from procengine.embed_outputs import EmbedOutputs
from procengine.messages import Register
from procengine.tokenizer import Tokenizer

__all__ = ["LexicalOutputs", "weight_pairs"]


class LexicalOutputs(EmbedOutputs):
    """All running `embed_sparse` requests of the group."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._special = tokenizer.special_token_ids

    def _data_of(self, register: Register, data: bytes) -> bytes:
        return weight_pairs(register.prompt_token_ids, data, self._special)


def weight_pairs(token_ids: list[int], weights: bytes, special: Collection[int]) -> bytes:
    """float32 pairs (token id, weight), by token id, of the float32 weight of each token. A token that occurs often
    has its largest weight; special ones and those of weight 0 are left out.

    Token ids are float32 as well: exact below 2^24, more than any vocabulary has.
    """
    by_token: dict[int, float] = {}
    for token_id, weight in zip(token_ids, np.frombuffer(weights, "<f4").tolist(), strict=True):
        if weight > by_token.get(token_id, 0.0) and token_id not in special:
            by_token[token_id] = weight
    return np.array(sorted(by_token.items()), "<f4").tobytes()
