"""What all messages have in common."""

from __future__ import annotations

from typing import dataclass_transform

import msgspec
from msgspec import Struct

__all__ = ["PROTOCOL_VERSION", "Message"]

PROTOCOL_VERSION = 1


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))  # type checkers: subclasses are frozen too
class Message(Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages: immutable, an array on the wire, invisible to the garbage collector."""
