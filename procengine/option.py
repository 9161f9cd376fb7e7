"""An option of a group, as one line of the table `EngineArgs` says it: whoever shows, reads or checks one asks here.

Owns: how an option is spelled in each place, and how a text becomes its value. Never does: know which there are.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from procengine.errors import ConfigError

__all__ = ["About", "Option", "options_of"]

_WORDS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_KINDS: Final[Mapping[type, str]] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_UNITS: Final[Mapping[str, str]] = {"s": "SECONDS", "ms": "MILLISECONDS", "bytes": "BYTES", "tokens": "TOKENS"}
_METAVARS: Final[Mapping[type, str]] = {int: "N", float: "X", str: "TEXT", bool: ""}


class About(NamedTuple):
    """What the table says of a field beside its type and default (as an annotation of it)."""

    section: str
    help: str
    low: float | None = None
    high: float | None = None
    unit: Literal["", "s", "ms", "bytes", "tokens"] = ""
    metavar: str = ""
    unset: Literal["auto", "off"] = "auto"  # what it means to give none: "decide for me", or "without it"
    is_secret: bool = False


class Option(NamedTuple):
    """One option: `about` it, and what its type and default are."""

    name: str
    kind: type  # int, float, bool or str; of a list, its items'
    default: Any  # msgspec.NODEFAULT: it must be given
    about: About
    choices: tuple[str, ...] = ()
    is_list: bool = False
    may_be_unset: bool = False

    @property
    def flag(self) -> str:
        """On a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """In the environment."""
        return "PROCENGINE_" + self.name.upper()

    @property
    def metavar(self) -> str:
        """What stands for its value in a help text."""
        return self.about.metavar or _UNITS.get(self.about.unit) or _METAVARS[self.kind]

    def shown(self, value: Any) -> str:
        """A value for people to read; the texts of `parse` and these are the same but for the unit."""
        if value is None:
            return self.about.unset
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            return " ".join(map(str, value)) or "none"
        return f"{value:g}" if isinstance(value, float) else f"{value}"

    @property
    def shown_default(self) -> str:
        """The default, with its unit."""
        text = self.shown(self.default)
        return f"{text} {self.about.unit}" if self.about.unit and self.default is not None else text

    def parse(self, text: str) -> Any:
        """The value that a text of a command line or of the environment stands for (of a list, one item).

        Raises:
            ConfigError: it stands for none.
        """
        if self.kind is str:
            return self._checked(text)
        if self.may_be_unset and text == self.about.unset:
            return None
        try:
            return _WORDS[text.lower()] if self.kind is bool else self.kind(text)
        except (KeyError, ValueError):
            raise ConfigError(f"{self.name}: must be {_KINDS[self.kind]}, got {text!r}") from None

    def parse_all(self, text: str) -> Any:
        """The same for the whole value: a list is one item, or a JSON list."""
        if not self.is_list:
            return self.parse(text)
        if not text.startswith("["):
            return (self.parse(text),)
        try:
            return msgspec.json.decode(text, type=tuple[str, ...])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.name}: must be a text or a JSON list of texts, got {text!r} ({error})") from error

    def convert(self, value: Any) -> Any:
        """The value that a file's value stands for: of the right type, not a text of it, but for "auto" and "off" (of a
        text: the empty one).

        Raises:
            ConfigError: it stands for none.
        """
        if self.is_list:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list) and all(isinstance(item, str) for item in items):
                return tuple(items)
            raise ConfigError(f"{self.name}: must be a text or a list of texts, got {value!r}")
        if self.may_be_unset and value == ("" if self.kind is str else self.about.unset):
            return None
        wanted = (int, float) if self.kind is float else (self.kind,)
        if not isinstance(value, wanted) or (isinstance(value, bool) and self.kind is not bool):
            raise ConfigError(f"{self.name}: must be {_KINDS[self.kind]}, got {value!r}")
        return self._checked(str(value)) if self.kind is str else self.kind(value)

    def check_range(self, value: Any) -> None:
        """Raises ConfigError: it is too small or too large (as not-a-number is)."""
        low, high = self.about.low, self.about.high
        if low is None or value is None or (low <= value and (high is None or value <= high)):
            return
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{self.name}: must be {limit}, got {value}")

    def _checked(self, text: str) -> str:
        if self.choices and text not in self.choices:
            raise ConfigError(f"{self.name}: must be one of {', '.join(self.choices)}, got {text!r}")
        return text


def options_of(table: type[msgspec.Struct]) -> dict[str, Option]:
    """The options of a table by name, in its order. Every field must be annotated with `About`."""
    hints = typing.get_type_hints(table, include_extras=True)
    return {field.name: _option(field, hints[field.name]) for field in msgspec.structs.fields(table)}


def _option(field: msgspec.structs.FieldInfo, hint: Any) -> Option:
    hint, about = typing.get_args(hint)
    assert isinstance(about, About)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    (kind,) = [part for part in typing.get_args(hint) if part is not type(None)] if is_union else [hint]
    option = Option(field.name, kind, field.default, about, may_be_unset=is_union)
    if typing.get_origin(kind) is Literal:
        return option._replace(kind=str, choices=typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return option._replace(kind=typing.get_args(kind)[0], is_list=True)
    return option
