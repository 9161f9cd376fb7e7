"""Parsers of tool calls by the name of their style.

Owns: the names, and the ids of calls. Never does: parse.
"""

from __future__ import annotations

import hashlib
from functools import partial
from types import MappingProxyType

from procengine.errors import ConfigError
from procengine.tool_calls.calls import FunctionCall, ToolCall, ToolCallDelta, ToolCallParser
from procengine.tool_calls.hermes import HermesParser
from procengine.tool_calls.llama3 import Llama3Parser
from procengine.tool_calls.mistral import MistralParser
from procengine.tool_calls.stream import StreamParser

__all__ = ["STYLES", "parse", "tool_call_parser"]

STYLES: MappingProxyType[str, type[StreamParser]] = MappingProxyType(
    {"hermes": HermesParser, "llama3": Llama3Parser, "mistral": MistralParser}
)


def tool_call_parser(style: str, id_seed: str) -> ToolCallParser:
    """A parser for one stream. `id_seed` tells this text from all others: the ids of its calls follow from it.

    Raises ConfigError for a style that does not exist.
    """
    parser = STYLES.get(style)
    if parser is None:
        raise ConfigError(f"tool_call_parser: there is no style {style!r}; there are: {', '.join(STYLES)}")
    return parser(partial(_call_id, style, id_seed))


def parse(style: str, text: str, id_seed: str = "") -> tuple[str, list[ToolCall]]:
    """Content and calls of a whole text: what a stream of it adds up to."""
    parser = tool_call_parser(style, id_seed)
    parts = (parser.push(text), parser.flush())
    deltas = [delta for part in parts for delta in part.tool_calls]
    return "".join(part.content for part in parts), _joined(deltas)


def _joined(deltas: list[ToolCallDelta]) -> list[ToolCall]:
    firsts = [delta for delta in deltas if delta.function.name is not None]
    arguments = [""] * len(firsts)
    for delta in deltas:
        arguments[delta.index] += delta.function.arguments
    return [
        ToolCall(first.id or "", FunctionCall(first.function.name or "", text))
        for first, text in zip(firsts, arguments, strict=True)
    ]


def _call_id(style: str, id_seed: str, index: int) -> str:
    digest = hashlib.sha256(f"{id_seed}:{index}".encode()).hexdigest()
    # Mistral's chat templates refuse ids that are not nine letters and digits.
    return digest[:9] if style == "mistral" else f"call_{digest[:24]}"
