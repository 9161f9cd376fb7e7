"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call.

Owns: those markers. Never does: read JSON (see `stream`).
"""

from __future__ import annotations

from procengine.tool_calls.stream import MalformedCallError, Steps, StreamParser

__all__ = ["HermesParser"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(StreamParser):
    """Text and calls in any order. A closing tag may be missing before the next opening one, and at the end."""

    def _run(self) -> Steps:
        yield
        while True:
            yield from self._text_until(_OPEN)
            try:
                yield from self._calls()
            except MalformedCallError:
                self._release()

    def _calls(self) -> Steps:
        marker: str | None = _OPEN
        while marker == _OPEN:
            yield from self._whitespace()
            yield from self._call_object(is_strict=False)
            yield from self._whitespace()
            marker = yield from self._one_of(_CLOSE, _OPEN)
        if marker is None:
            raise MalformedCallError
        self._held.clear()
        yield from self._whitespace()
