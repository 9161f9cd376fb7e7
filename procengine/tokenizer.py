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

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 come out as U+FFFD; ids outside the vocabulary are left out."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry spelt exactly `token` (not of a text), or None."""
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry of `token_id` as the file spells it (e.g. `Ġthe`), or None outside the vocabulary."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None


def _why_not_text(texts: Sequence[str]) -> str:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {index} is a {type(text).__name__}, not a string"
        if any("\ud800" <= char <= "\udfff" for char in text):
            return f"text {index} holds half of a surrogate pair, which is not Unicode text"
    return "a text cannot be encoded"
