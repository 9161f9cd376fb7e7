"""How many tokens a text has at least, without tokenizing it. Pure.

Owns: for which tokenizers that can be said. Never does: tokenize.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

__all__ = ["longest_token_bytes", "min_num_tokens"]

# Steps before a byte-level model that cut a text and take nothing away from it.
_CUTTING_STEPS = ("ByteLevel", "Digits", "Split")


def min_num_tokens(num_bytes: int, longest: int) -> int:
    """Tokens of a text of `num_bytes` UTF-8 bytes, at least, if each stands for `longest` of them at most."""
    return -(-num_bytes // longest)


def longest_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """The most bytes of a text that one token stands for; None where any number may go, or become fewer, unseen.

    That is known of byte-level BPE. A normalizer may shorten a text (NFC does), a pre-tokenizer may drop spaces, an
    added token may swallow those around it, and an unknown token stands for a word of any length.
    """
    added = list(backend.get_added_tokens_decoder().values())
    if backend.normalizer is not None or any(token.lstrip or token.rstrip for token in added):
        return None
    if not isinstance(backend.model, tokenizers.models.BPE) or not _only_cuts_into_bytes(backend.pre_tokenizer):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if any(byte not in vocabulary for byte in tokenizers.pre_tokenizers.ByteLevel.alphabet()):
        return None  # a byte that has no token is left out
    # Byte-level tokens are spelt with one character a byte.
    return max(*map(len, vocabulary), *(len(token.content.encode()) for token in added), 1)


def _only_cuts_into_bytes(pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer | None) -> bool:
    if pre_tokenizer is None:
        return False
    state = json.loads(pre_tokenizer.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    return any(step["type"] == "ByteLevel" for step in steps) and all(map(_keeps_everything, steps))


def _keeps_everything(step: dict[str, Any]) -> bool:
    return step["type"] in _CUTTING_STEPS and step.get("behavior") != "Removed"
