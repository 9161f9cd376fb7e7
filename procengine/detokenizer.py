"""Incremental detokenisation: token ids in, text that can no longer change out. Pure.

Owns: where a character that is split over tokens waits for its other half. Never does: decode a whole text again,
look for stop strings, or know about requests.
Byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM) go through a table of bytes and a UTF-8 decoder; all others decode
a short window of tokens with the library's decoder.
"""

from __future__ import annotations

import codecs
import json
from array import array
from collections.abc import Sequence
from typing import Protocol

from procengine.tokenizer import Tokenizer

__all__ = ["Detokenizer", "TextStream"]

_NONE: frozenset[int] = frozenset()
_REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """The text of one generation. All deltas joined equal `decode(ids)`, however the ids were grouped."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The end of the stream: incomplete bytes come out as U+FFFD, as `Tokenizer.decode` shows them."""
        ...


class Detokenizer:
    """Makes text streams for one tokenizer. Build it once: the byte table costs some tens of milliseconds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = _ByteTable(tokenizer) if _is_byte_level(tokenizer) else None
        self._byte_tokens = _NONE if self._table is not None else _byte_fallback_ids(tokenizer)

    def stream(self, prompt_tail: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
        """A stream for the tokens that follow `prompt_tail`, the last few ids of the prompt.

        A raw byte-level text is `decode(output)` and needs no tail. Decoders that treat a text's first token specially
        (a leading space of SentencePiece is not shown) give `decode(tail + output)` less `decode(tail)`.
        """
        skipped = self._tokenizer.special_token_ids if skip_special_tokens else _NONE
        if self._table is not None:
            return _ByteStream(self._table, skipped)
        return _WindowStream(self._tokenizer, self._byte_tokens, skipped, prompt_tail)

    def text(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of `token_ids`."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` stands for (logprobs list them), often less than a character; b"" outside it."""
        if self._table is not None:
            return self._table.token_bytes(token_id)
        if token_id in self._byte_tokens:
            token = self._tokenizer.id_to_token(token_id) or ""
            return bytes([int(token[3:5], 16)])
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class _ByteTable:
    """The bytes of every token, as one blob and the offsets into it: a few bytes a token instead of an object each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        offsets = array("I", [0])
        pieces: list[bytes] = []
        total = 0
        for token_id in range(_max_id(tokenizer) + 1):
            piece = _token_to_bytes(tokenizer.id_to_token(token_id) or "")
            pieces.append(piece)
            total += len(piece)
            offsets.append(total)
        self.blob = b"".join(pieces)
        self.offsets = offsets
        self.size = len(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.size:  # models pad their vocabulary beyond the tokenizer's
            return b""
        return self.blob[self.offsets[token_id] : self.offsets[token_id + 1]]


class _ByteStream:
    def __init__(self, table: _ByteTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._pending = b""  # the start of a character whose end is still to come

    def push(self, token_ids: Sequence[int]) -> str:
        skipped, token_bytes = self._skipped, self._table.token_bytes
        if len(token_ids) == 1:  # a decode step: no list, no join
            data = b"" if token_ids[0] in skipped else token_bytes(token_ids[0])
        else:
            data = b"".join([token_bytes(i) for i in token_ids if i not in skipped])
        if self._pending:
            data = self._pending + data
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class _WindowStream:
    """Decodes `context + pending` and shows what goes beyond `context`, the tokens whose text was shown last."""

    def __init__(
        self, tokenizer: Tokenizer, byte_tokens: frozenset[int], skipped: frozenset[int], prompt_tail: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = byte_tokens
        self._skipped = skipped
        self._context = self._visible(prompt_tail)
        self._shown = self._decode(self._context)
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in self._visible(token_ids):
            self._pending.append(token_id)
            # A run of byte tokens is one unit for the decoder: until it ends, even its first character may change.
            if token_id not in self._byte_tokens:
                text += self._advance(final=False)
        return text

    def flush(self) -> str:
        return self._advance(final=True) if self._pending else ""

    def _advance(self, final: bool) -> str:
        full = self._decode(self._context + self._pending)
        if full.endswith(_REPLACEMENT) and not final:
            return ""
        num_shown = _common_length(full, self._shown)
        self._context, self._pending = self._pending, []
        self._shown = self._decode(self._context)
        return full[num_shown:]

    def _visible(self, token_ids: Sequence[int]) -> list[int]:
        # Tokens that render nothing must not become the context: the next one would look like a text's first.
        skipped, known = self._skipped, self._tokenizer.id_to_token
        return [i for i in token_ids if i not in skipped and known(i) is not None]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _common_length(text: str, prefix: str) -> int:
    if text.startswith(prefix):
        return len(prefix)
    return next((i for i, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b), min(len(text), len(prefix)))


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = tokenizer.backend.decoder
    return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"


def _byte_fallback_ids(tokenizer: Tokenizer) -> frozenset[int]:
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)


def _max_id(tokenizer: Tokenizer) -> int:
    added = tokenizer.backend.get_added_tokens_decoder()
    return max(tokenizer.backend.get_vocab_size(with_added_tokens=False) - 1, *added, 0)


def _byte_level_alphabet() -> str:
    """The character that GPT-2's byte-level BPE writes for each byte (`bytes_to_unicode` in OpenAI's encoder.py).

    Printable Latin-1 stands for itself; the other bytes, in order, are U+0100, U+0101, ...
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte) if byte in printable else chr(0x100 + hidden.index(byte)) for byte in range(256))


_BYTE_BY_CHARACTER = codecs.charmap_build(_byte_level_alphabet())


def _token_to_bytes(token: str) -> bytes:
    try:
        return codecs.charmap_encode(token, "strict", _BYTE_BY_CHARACTER)[0]
    except UnicodeEncodeError:  # an added token in plain text: the library's decoder takes such a token as it is
        return token.encode()
