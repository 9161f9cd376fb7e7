"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and the newer `[TOOL_CALLS]name{...}`.

Owns: those forms. Never does: read JSON (see `stream`).
"""

from __future__ import annotations

from procengine.tool_calls.stream import MalformedCallError, Steps, StreamParser

__all__ = ["MistralParser"]

_MARKER = "[TOOL_CALLS]"
_ARGUMENTS_MARKER = "[ARGS]"  # between name and arguments, where special tokens are part of the text


class MistralParser(StreamParser):
    """Text and calls in any order; the newer form repeats the marker for each call."""

    def _run(self) -> Steps:
        yield
        while True:
            yield from self._text_until(_MARKER)
            try:
                yield from self._whitespace()
                yield from self._array() if self._char == "[" else self._named()
                yield from self._whitespace()
            except MalformedCallError:
                self._release()

    def _array(self) -> Steps:
        yield from self._hold()
        yield from self._whitespace()
        yield from self._call_object(is_strict=False)
        yield from self._whitespace()
        while self._char == ",":
            yield from self._hold()
            yield from self._whitespace()
            yield from self._call_object(is_strict=False)
            yield from self._whitespace()
        if self._char != "]":
            raise MalformedCallError
        self._held.clear()
        yield

    def _named(self) -> Steps:
        name = ""
        while self._char.isalnum() or self._char in "_-.:/":
            name += self._char
            yield from self._hold()
        yield from self._whitespace()
        if self._char == _ARGUMENTS_MARKER[0]:
            yield from self._one_of(_ARGUMENTS_MARKER)
            yield from self._whitespace()
        if not name or self._char != "{":
            raise MalformedCallError
        self._announce(name)
        yield from self._stream_arguments()
