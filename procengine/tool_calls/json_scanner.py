"""Follows one JSON value character by character.

Owns: where a value ends, and at which character it stops being JSON. Never does: build the value (`json` does that), or
recurse: nesting is the model's, and so a client's, to choose.

Written here because parsers of partial JSON (partial-json-parser, jiter) start anew with each piece and give values;
a stream of calls needs the raw text of a value while it comes, and the place where it ends.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["WHITESPACE", "JSONScanner"]

WHITESPACE = " \t\n\r"
_MAX_DEPTH = 200
_DIGITS = "0123456789"
_AFTER = {"{": "}", "[": "]"}
# RFC 8259, section 6: state -> what each character leads to. States in _NUMBER_ENDS may be the last.
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {"0": "zero", **dict.fromkeys("123456789", "integer")},
    "zero": {".": "point", "e": "e", "E": "e"},
    "integer": {".": "point", "e": "e", "E": "e", **dict.fromkeys(_DIGITS, "integer")},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "e", "E": "e", **dict.fromkeys(_DIGITS, "fraction")},
    "e": {"+": "sign", "-": "sign", **dict.fromkeys(_DIGITS, "exponent")},
    "sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
_NUMBER_STARTS = {"-": "minus", **_NUMBER["minus"]}
_NUMBER_ENDS = ("zero", "integer", "fraction", "exponent")


class JSONScanner:
    """One value, without whitespace before it. Strict: RFC 8259, at most 200 levels deep."""

    def __init__(self) -> None:
        self._next: Callable[[str], bool] = self._value
        self._closers: list[str] = []
        self._in_key = False
        self._rest = ""  # of a literal, or as many characters as a \\u escape lacks
        self._number = ""
        self.is_complete = False

    def push(self, char: str) -> bool:
        """Take one character. False: it is not part of the value, which is complete before it or is not JSON."""
        return self._next(char)

    def _value(self, char: str) -> bool:
        if char in _AFTER:
            self._closers.append(_AFTER[char])
            self._next = self._first_key if char == "{" else self._first_item
            return len(self._closers) <= _MAX_DEPTH
        if char == '"':
            self._in_key, self._next = False, self._string
        elif char in _NUMBER_STARTS:
            self._number, self._next = _NUMBER_STARTS[char], self._in_number
            self.is_complete = not self._closers and self._number in _NUMBER_ENDS
        elif char in "tfn":
            self._rest, self._next = {"t": "rue", "f": "alse", "n": "ull"}[char], self._literal
        else:
            return char in WHITESPACE and bool(self._closers)
        return True

    def _first_item(self, char: str) -> bool:
        return self._close() if char == "]" else self._value(char)

    def _first_key(self, char: str) -> bool:
        return self._close() if char == "}" else self._key(char)

    def _key(self, char: str) -> bool:
        if char == '"':
            self._in_key, self._next = True, self._string
            return True
        return char in WHITESPACE

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._next = self._value
            return True
        return char in WHITESPACE

    def _comma_or_end(self, char: str) -> bool:
        if char == ",":
            self._next = self._key if self._closers[-1] == "}" else self._value
            return True
        return self._close() if char == self._closers[-1] else char in WHITESPACE

    def _string(self, char: str) -> bool:
        if char == '"':
            return self._key_done() if self._in_key else self._value_done()
        if char == "\\":
            self._next = self._escape
        return char >= " "

    def _escape(self, char: str) -> bool:
        if char == "u":
            self._rest, self._next = "0000", self._hex_digit
            return True
        self._next = self._string
        return char in '"\\/bfnrt'

    def _hex_digit(self, char: str) -> bool:
        self._rest = self._rest[1:]
        if not self._rest:
            self._next = self._string
        return char in "0123456789abcdefABCDEF"

    def _literal(self, char: str) -> bool:
        expected, self._rest = self._rest[0], self._rest[1:]
        return char == expected and (bool(self._rest) or self._value_done())

    def _in_number(self, char: str) -> bool:
        following = _NUMBER[self._number].get(char)
        if following is not None:
            self._number = following
            self.is_complete = not self._closers and following in _NUMBER_ENDS
            return True
        if self._number not in _NUMBER_ENDS or not self._closers:
            return False
        self._next = self._comma_or_end
        return self._comma_or_end(char)

    def _close(self) -> bool:
        self._closers.pop()
        return self._value_done()

    def _key_done(self) -> bool:
        self._next = self._colon
        return True

    def _value_done(self) -> bool:
        self.is_complete = not self._closers
        self._next = self._nothing if self.is_complete else self._comma_or_end
        return True

    def _nothing(self, char: str) -> bool:
        return False
