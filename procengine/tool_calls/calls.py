"""Tool calls as values, and what every parser of them offers.

Owns: the shapes. Never does: parse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["ParsedDelta", "ToolCall", "ToolCallDelta", "ToolCallParser"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call. `arguments_json` is the JSON text of an object, as the model wrote it; cut where the text was."""

    index: int
    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What one push added to one call. `name` comes once, in the first delta of an index; `arguments` add up."""

    index: int
    id: str
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedDelta:
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
