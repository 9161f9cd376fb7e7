"""Facts read from a tokenizer.json without building the tokenizer, which costs ten times as much.

Owns: those few fields. Never does: tokenize.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from procengine.errors import ModelError

__all__ = ["added_tokens"]


class _AddedToken(msgspec.Struct):
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def added_tokens(path: str | Path) -> frozenset[str]:
    """Texts of the tokens that stand outside the vocabulary proper: special ones, and markers such as <tool_call>.

    Raises ModelError when the file is missing or no tokenizer.json.
    """
    try:
        file = msgspec.json.decode(Path(path).read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path}: not a tokenizer.json: {error}") from error
    return frozenset(token.content for token in file.added_tokens)
