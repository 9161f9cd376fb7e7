"""Text to token ids and back, over the `tokenizers` library.

Owns: loading a tokenizer.json and the few calls the engine needs. Never does: truncate, pad, apply a chat template,
or import transformers (which would bring torch into processes that must stay small).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from procengine.errors import InvalidRequestError, ModelError

__all__ = ["Tokenizer"]


class Tokenizer:
    """A tokenizer whose ids are exactly those of `tokenizers`; safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # A file may have truncation and padding baked in (sentence-transformers do); lengths are ours to decide.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json. Raises ModelError when it is missing or not a tokenizer."""
        if not Path(path).is_file():
            raise ModelError(f"{path}: there is no such tokenizer file")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path}: not a tokenizer.json that the tokenizers library can read: {error}") from error
        return cls(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidRequestError when it cannot be written as UTF-8."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise InvalidRequestError(_why_not_text([text])) from error

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, in order, encoded in parallel. Starts the library's thread pool; `encode` does not.

        Raises InvalidRequestError naming the first text that cannot be written as UTF-8.
        """
        try:
            # "fast" leaves out character offsets, which nothing here asks for.
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidRequestError(_why_not_text(texts)) from error
        return [encoding.ids for encoding in encodings]

    def encode_cut(self, text: str, pair: str | None, max_tokens: int | None) -> tuple[list[int], list[int]]:
        """Token ids of a text, or of two, special tokens included, and which of the two each belongs to.

        Of more than `max_tokens` the last are left out, of the longer text first.

        Raises InvalidRequestError when a text cannot be written as UTF-8, or there is no room for any.
        """
        texts = [text] if pair is None else [text, pair]
        try:
            encodings = [self.backend.encode(one, add_special_tokens=False) for one in texts]
        except TypeError as error:
            raise InvalidRequestError(_why_not_text(texts)) from error
        if max_tokens is not None:
            room = max_tokens - self.backend.num_special_tokens_to_add(pair is not None)
            for encoding, size in zip(encodings, _shares([len(one.ids) for one in encodings], room), strict=True):
                encoding.truncate(size)
        whole = self.backend.post_process(encodings[0], None if pair is None else encodings[1])
        return whole.ids, whole.type_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 come out as U+FFFD; ids outside the vocabulary are left out."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry spelt exactly `token` (not of a text), or None."""
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry of `token_id` as the file spells it (e.g. `Ġthe`), or None outside the vocabulary."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None


def _shares(lengths: list[int], room: int) -> list[int]:
    """How much of each there is room for: the longer one gives way until both are as long."""
    if room < len(lengths):
        raise InvalidRequestError(f"truncate_prompt_tokens: leaves room for {max(room, 0)} tokens of the text")
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    least = min(first, second, room // 2)
    return [room - least, least] if first > second else [least, room - least]


def _why_not_text(texts: Sequence[str]) -> str:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {index} is a {type(text).__name__}, not a string"
        if any("\ud800" <= char <= "\udfff" for char in text):
            return f"text {index} holds half of a surrogate pair, which is not Unicode text"
    return "a text cannot be encoded"
