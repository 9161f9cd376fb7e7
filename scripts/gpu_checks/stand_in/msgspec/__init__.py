"""Stands in for msgspec in scripts/gpu_check, where that is not installed: structs as dataclasses, nothing encoded.

Owns: as much as the engine needs in one process. Never does: encode, decode or check a value; whoever asks is told so.
"""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any, NoReturn

__all__ = ["DecodeError", "Meta", "Raw", "Struct", "ValidationError", "field", "json", "msgpack", "structs"]

field = dataclasses.field
Raw = bytes


class DecodeError(Exception):
    """As msgspec's; never raised here."""


class ValidationError(DecodeError):
    """As msgspec's; never raised here."""


class Meta:
    """A constraint that nobody checks."""

    def __init__(self, **_: Any) -> None:
        """Takes what msgspec's takes."""


class Struct:
    """A dataclass by inheritance. `kw_only` and `frozen` mean something, other options of msgspec's are ignored."""

    def __init_subclass__(cls, *, kw_only: bool = False, **_: Any) -> None:
        # Frozen values stay writable: a base that is not frozen forbids it in a dataclass, and nobody writes to them.
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, list | dict | set) and not default:  # msgspec makes a new one for each
                setattr(cls, name, dataclasses.field(default_factory=type(default)))
        dataclasses.dataclass(kw_only=kw_only, unsafe_hash=True)(cls)


def _cannot(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("this needs msgspec, which is not installed")


class _Coder:
    """An encoder or a decoder that can be made, and not used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.encode = self.decode = self.encode_into = _cannot


json = SimpleNamespace(Encoder=_Coder, Decoder=_Coder, encode=_cannot, decode=_cannot, format=_cannot)
msgpack = SimpleNamespace(Encoder=_Coder, Decoder=_Coder, encode=_cannot, decode=_cannot)
structs = SimpleNamespace(
    replace=dataclasses.replace,
    asdict=dataclasses.asdict,
    fields=dataclasses.fields,
    force_setattr=setattr,
)
convert = to_builtins = _cannot
