"""Llama 3: `{"name": ..., "parameters": {...}}` at the start of the text or after `<|python_tag|>`; more after `;`.

Owns: that form. Never does: read JSON (see `stream`), or take for a call what a model says in JSON of another kind: an
object without a marker is one only with the members of a call, and is content from the first other member on.
"""

from __future__ import annotations

from procengine.tool_calls.stream import MalformedCallError, Steps, StreamParser

__all__ = ["Llama3Parser"]

_MARKER = "<|python_tag|>"


class Llama3Parser(StreamParser):
    """Calls first, then text."""

    def _run(self) -> Steps:
        yield
        yield from self._whitespace()
        if self._char == "{":
            yield from self._calls(is_strict=True)
        while True:
            yield from self._text_until(_MARKER)
            yield from self._whitespace()
            yield from self._calls(is_strict=False)

    def _calls(self, is_strict: bool) -> Steps:
        try:
            yield from self._call_object(is_strict)
            yield from self._whitespace()
            while self._char == ";":
                yield from self._hold()
                yield from self._whitespace()
                yield from self._call_object(is_strict)
                yield from self._whitespace()
        except MalformedCallError:
            self._release()
