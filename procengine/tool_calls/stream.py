"""What the parsers share: a text read one character at a time, and what comes out of it.

Owns: text that is held back, deltas that are not yet handed out, and the reading of one call object. Never does: know
a style's markers; those are in the modules beside it.

A style is a generator, `_run`, which looks at `self._char` and says `yield` when it wants the next one. Whatever it
passes over is held; what is held becomes content when it turns out not to be a call, and goes when it does. Once a
call's name and the first character of its arguments are known, the call is announced and its arguments stream. What is
not JSON after that ends the call there, and is content: what was sent cannot be taken back, and nothing is lost.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator

from procengine.tool_calls.calls import FunctionCallDelta, ParsedDelta, ToolCallDelta
from procengine.tool_calls.json_scanner import WHITESPACE, JSONScanner

__all__ = ["MalformedCallError", "Steps", "StreamParser"]

Steps = Generator[None, None, None]
_ARGUMENTS = ("arguments", "parameters")
_KNOWN = ("name", "type", "id", *_ARGUMENTS)


class MalformedCallError(Exception):
    """What was read is no call. Stays inside this package."""


class StreamParser(ABC):
    """A `ToolCallParser`; `id_of` gives the id of the call with an index."""

    def __init__(self, id_of: Callable[[int], str]) -> None:
        self._id_of = id_of
        self._char = ""
        self._held: list[str] = []
        self._is_markup = False  # what is held belongs to a call that was announced
        self._skip_to: str | None = None  # while in plain text: the character that may begin a marker
        self._content: list[str] = []
        self._deltas: list[tuple[int, str | None, list[str]]] = []
        self._num_calls = 0
        self._steps = self._run()
        next(self._steps)

    def push(self, text: str) -> ParsedDelta:
        """See `ToolCallParser`."""
        position = 0
        while position < len(text):
            if self._skip_to is not None:
                found = text.find(self._skip_to, position)
                end = found if found >= 0 else len(text)
                self._content.append(text[position:end])
                position = end
            if position < len(text):
                self._char = text[position]
                position += 1
                next(self._steps)
        return self._take()

    def flush(self) -> ParsedDelta:
        """See `ToolCallParser`. A call that was announced stays, its arguments cut where the text was."""
        if self._is_markup:
            self._held.clear()
        self._release()
        return self._take()

    @abstractmethod
    def _run(self) -> Steps:
        """The style. Yields once before it looks at the first character; never ends."""

    def _take(self) -> ParsedDelta:
        calls = tuple(self._delta(index, name, "".join(arguments)) for index, name, arguments in self._deltas)
        content = "".join(self._content)
        self._content, self._deltas = [], []
        return ParsedDelta(content, calls)

    def _delta(self, index: int, name: str | None, arguments: str) -> ToolCallDelta:
        if name is None:
            return ToolCallDelta(index, FunctionCallDelta(arguments))
        return ToolCallDelta(index, FunctionCallDelta(arguments, name), self._id_of(index), "function")

    def _hold(self) -> Steps:
        """Pass over a character that may be markup."""
        self._held.append(self._char)
        yield

    def _release(self) -> None:
        """What is held is content after all."""
        self._content.extend(self._held)
        self._held.clear()
        self._is_markup = False

    def _whitespace(self) -> Steps:
        while self._char in WHITESPACE:
            yield from self._hold()

    def _one_of(self, *markers: str) -> Generator[None, None, str | None]:
        """Hold a marker and return it, or None at the character that makes it none of them.

        No marker has its first character again further on, so the characters held by then cannot begin another one.
        """
        seen = ""
        while seen not in markers:
            if not any(marker.startswith(seen + self._char) for marker in markers):
                return None
            seen += self._char
            yield from self._hold()
        return seen

    def _text_until(self, marker: str) -> Steps:
        """Content, up to a marker, which is held."""
        self._is_markup = False
        while (yield from self._one_of(marker)) is None:
            self._release()
            if self._char != marker[0]:
                self._content.append(self._char)
                self._skip_to = marker[0]
                yield
                self._skip_to = None

    def _announce(self, name: str, arguments: str = "") -> None:
        """A call begins, with the text of its arguments so far; what was held is part of it."""
        self._deltas.append((self._num_calls, name, [arguments]))
        self._num_calls += 1
        self._is_markup = True
        self._held.clear()

    def _add_arguments(self, text: str) -> None:
        index = self._num_calls - 1
        if not self._deltas or self._deltas[-1][0] != index:
            self._deltas.append((index, None, []))
        self._deltas[-1][2].append(text)

    def _stream_arguments(self) -> Steps:
        """The arguments of the call that was announced last, from the first character of their object."""
        scanner = JSONScanner()
        while scanner.push(self._char):
            self._add_arguments(self._char)
            yield
        if not scanner.is_complete:
            raise MalformedCallError

    def _call_object(self, is_strict: bool) -> Steps:
        """`{"name": ..., "arguments": {...}}`, from its first character; "parameters" says the same as "arguments".

        is_strict: there is no marker to say that this is a call, so it has its arguments, and nothing that no call has.
        """
        if self._char != "{":
            raise MalformedCallError
        call = _CallObject(self._announce, is_strict)
        self._is_markup = False
        yield from self._hold()
        yield from self._whitespace()
        while True:
            yield from self._member(call)
            yield from self._whitespace()
            if self._char == "}":
                call.close()
                break
            if self._char != ",":
                raise MalformedCallError
            yield from self._hold()
            yield from self._whitespace()
        self._held.clear()
        yield

    def _member(self, call: _CallObject) -> Steps:
        key = yield from self._string()
        yield from self._whitespace()
        if self._char != ":" or not call.may_have(key):
            raise MalformedCallError
        yield from self._hold()
        yield from self._whitespace()
        if key == "name":
            call.set_name((yield from self._string()))
        elif key in _ARGUMENTS and self._char != "{":
            raise MalformedCallError
        elif key in _ARGUMENTS and call.start_arguments():
            yield from self._stream_arguments()
        else:
            value = yield from self._value()
            if key in _ARGUMENTS:
                call.early_arguments = value

    def _value(self) -> Generator[None, None, str]:
        """The text of any JSON value, which is held."""
        scanner = JSONScanner()
        text: list[str] = []
        while scanner.push(self._char):
            text.append(self._char)
            yield from self._hold()
        if not scanner.is_complete:
            raise MalformedCallError
        return "".join(text)

    def _string(self) -> Generator[None, None, str]:
        if self._char != '"':
            raise MalformedCallError
        text: str = json.loads((yield from self._value()))
        return text


class _CallObject:
    """What is known of a call while its object is read; the order of its members is the model's choice."""

    def __init__(self, announce: Callable[[str, str], None], is_strict: bool) -> None:
        self._on_announce = announce
        self._is_strict = is_strict
        self._seen: set[str] = set()
        self._name: str | None = None
        self._is_announced = False
        self.early_arguments: str | None = None

    def may_have(self, key: str) -> bool:
        key = "arguments" if key in _ARGUMENTS else key
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new and (key in _KNOWN or not self._is_strict)

    def set_name(self, name: str) -> None:
        if not name or not name.isprintable():
            raise MalformedCallError
        self._name = name
        if self.early_arguments is not None:
            self._announce(self.early_arguments)

    def start_arguments(self) -> bool:
        """Whether the name is known, so that the arguments can be streamed."""
        if self._name is not None:
            self._announce("")
        return self._is_announced

    def close(self) -> None:
        if self._is_announced:
            return
        if self._name is None or self._is_strict:
            raise MalformedCallError
        self._announce("{}")

    def _announce(self, arguments: str) -> None:
        assert self._name is not None
        self._is_announced = True
        self._on_announce(self._name, arguments)
