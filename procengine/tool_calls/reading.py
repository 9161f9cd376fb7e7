"""Results and deltas with the calls taken out of their text. Pure.

Owns: one parser a choice, and the finish reason "tool_calls". Never does: know a style.
"""

from __future__ import annotations

import msgspec

from procengine.outputs import CompletionOutput, RequestOutput, StreamDelta
from procengine.tool_calls.calls import ParsedDelta, ToolCallDelta, ToolCallParser
from procengine.tool_calls.registry import parse, tool_call_parser

__all__ = ["CallStream", "read_calls"]


def read_calls(output: RequestOutput, style: str | None, id_seed: str) -> RequestOutput:
    """The result with `tool_calls` in each choice, and in `text` what is no call; None leaves it as it is.

    `id_seed` tells this request from all others: the ids of its calls follow from it.
    """
    if style is None:
        return output
    return msgspec.structs.replace(output, outputs=[_read_choice(one, style, id_seed) for one in output.outputs])


class CallStream:
    """The deltas of one request, all choices, one after the other. What may become a call is held back."""

    def __init__(self, style: str | None, id_seed: str) -> None:
        self._style = style
        self._id_seed = id_seed
        self._parsers: dict[int, ToolCallParser] = {}
        self._with_calls: set[int] = set()

    def read(self, delta: StreamDelta) -> StreamDelta:
        """The delta with additions to calls in `tool_calls`, and in `text` what is none. Its kind is not cumulative."""
        if self._style is None:
            return delta
        index = delta.index
        if index not in self._parsers:
            self._parsers[index] = tool_call_parser(self._style, f"{self._id_seed}:{index}")
        parts = [self._parsers[index].push(delta.text)]
        if delta.finish_reason is not None:
            parts.append(self._parsers.pop(index).flush())
        content, calls = _joined(parts)
        if calls:
            self._with_calls.add(index)
        return msgspec.structs.replace(
            delta,
            text=content,
            tool_calls=calls or None,
            finish_reason=_finish_reason(delta.finish_reason, index in self._with_calls),
        )


def _joined(parts: list[ParsedDelta]) -> tuple[str, list[ToolCallDelta]]:
    return "".join(part.content for part in parts), [call for part in parts for call in part.tool_calls]


def _read_choice(output: CompletionOutput, style: str, id_seed: str) -> CompletionOutput:
    content, calls = parse(style, output.text, f"{id_seed}:{output.index}")
    reason = _finish_reason(output.finish_reason, bool(calls))
    return msgspec.structs.replace(output, text=content, tool_calls=calls, finish_reason=reason)


def _finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """A choice that was cut keeps its reason: its last call may not be whole."""
    return "tool_calls" if reason == "stop" and has_calls else reason
