"""Tool calls as values, in the shape of OpenAI's API, and what every parser of them offers.

Owns: the shapes; `msgspec.to_builtins` gives the JSON of them. Never does: parse.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

__all__ = ["FunctionCall", "FunctionCallDelta", "ParsedDelta", "ToolCall", "ToolCallDelta", "ToolCallParser"]


class FunctionCall(msgspec.Struct, frozen=True):
    """`arguments` is the JSON text of an object, as the model wrote it; cut where the text was."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A whole call. An assistant's message may hold it as it is."""

    id: str
    function: FunctionCall
    type: str = "function"


class FunctionCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """`name` comes once, in the first delta of a call; `arguments` add up."""

    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was added to the call with this index. `id` and `type` come once, in the first delta of a call."""

    index: int
    function: FunctionCallDelta
    id: str | None = None
    type: str | None = None


class ParsedDelta(msgspec.Struct, frozen=True):
    """What one push made certain: text to show, and additions to calls, in order."""

    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ToolCallParser(Protocol):
    """The state of one stream. What comes out, added up, does not depend on how the text was cut into pushes."""

    def push(self, text: str) -> ParsedDelta:
        """Take the next piece of text. What may yet become markup is held back."""
        ...

    def flush(self) -> ParsedDelta:
        """The end of the text: what was held back and did not become a call. The parser is not used again."""
        ...
