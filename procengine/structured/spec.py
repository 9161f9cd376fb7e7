"""`StructuredOutputs`: the form that the text of one request must have. vLLM's names.

Owns: which fields there are and that one of them is given. Never does: compile, or judge a schema (see `compiler`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from procengine.errors import InvalidRequestError

__all__ = ["StructuredOutputs"]

_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Exactly one of the first five fields is given.

    Attributes:
        json_schema: the text is JSON that this schema (an object, or its JSON text) validates.
        json_object: the text is any JSON object.
        regex: the whole text matches this expression (Rust's syntax: no look-around, no back-references).
        choice: the text is one of these.
        grammar: the text is derived from this grammar: llguidance's Lark, or llama.cpp's GBNF, with its rule `root`.
        disable_any_whitespace: JSON comes without spaces and line breaks between its parts.
        whitespace_pattern: a regular expression for what may stand between the parts of JSON; default any whitespace.

    Raises:
        InvalidRequestError: none or several are given, or a value is of the wrong type (names the field).
    """

    json_schema: dict[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise InvalidRequestError(f"structured_outputs: give exactly one of {', '.join(_KINDS)}; got {found}")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name}: must be true or false, got {getattr(self, name)!r}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequestError(f"{name}: must be a string, got {getattr(self, name)!r}")
        if not isinstance(self.json_schema, dict | str | None):
            raise InvalidRequestError(f"json_schema: must be an object or its JSON text, got {self.json_schema!r}")
        self._check_choice()
        self._check_whitespace()

    @property
    def kind(self) -> str:
        """The name of the one field that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        if not isinstance(self.choice, list | tuple) or not self.choice:
            raise InvalidRequestError(f"choice: must be a list of at least one string, got {self.choice!r}")
        for text in self.choice:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"choice: every choice must be a non-empty string, got {text!r}")

    def _check_whitespace(self) -> None:
        asked = "whitespace_pattern" if self.whitespace_pattern is not None else "disable_any_whitespace"
        if self.whitespace_pattern is None and not self.disable_any_whitespace:
            return
        if self.kind not in ("json_schema", "json_object"):
            raise InvalidRequestError(f"{asked}: belongs to json_schema and json_object, not to {self.kind}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise InvalidRequestError("whitespace_pattern: cannot be given along with disable_any_whitespace")
