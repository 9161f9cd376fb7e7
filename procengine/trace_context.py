"""W3C Trace Context: which span of its caller a request belongs to (https://www.w3.org/TR/trace-context/).

Owns: the format of `traceparent`, and its form in a span record. Never does: make ids, or export spans.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final, Self

from procengine.errors import InvalidRequestError

__all__ = ["TraceContext"]

_FORMAT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_WORDS: Final = struct.Struct(">3q")
_SAMPLED: Final = 1
_MAX_LENGTH: Final = 256  # of a later version's; version 00 has 55 characters
_MAX_SHOWN: Final = 80


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A caller's span: `trace_id` (128 bits, not 0), `span_id` (64 bits, not 0) and `flags` (8 bits; 1 is sampled)."""

    trace_id: int
    span_id: int
    flags: int

    @property
    def is_sampled(self) -> bool:
        """Whether the caller records this trace."""
        return bool(self.flags & _SAMPLED)

    @classmethod
    def parse(cls, traceparent: str) -> Self:
        """From the header's text.

        Raises:
            InvalidRequestError: it is none. What later versions append is passed over, as the standard wants it.
        """
        found = _FORMAT.fullmatch(traceparent) if len(traceparent) <= _MAX_LENGTH else None
        version = found[1] if found else "ff"
        if found is None or version == "ff" or (version == "00" and found[5]):
            raise InvalidRequestError(
                "traceparent: must be 00-<32 hex digits>-<16 hex digits>-<2 hex digits>, in lower case, got "
                f"{traceparent[:_MAX_SHOWN]!r}"
            )
        context = cls(int(found[2], 16), int(found[3], 16), int(found[4], 16))
        if not context.trace_id or not context.span_id:
            raise InvalidRequestError(f"traceparent: trace id and span id must not be 0, got {traceparent!r}")
        return context

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"

    def to_words(self) -> tuple[int, int, int, int]:
        """As four signed 64-bit integers: the trace id (high, low), the span id, the flags."""
        data = self.trace_id.to_bytes(16, "big") + self.span_id.to_bytes(8, "big")
        high, low, span = _WORDS.unpack(data)
        return high, low, span, self.flags

    @classmethod
    def from_words(cls, words: tuple[int, int, int, int]) -> Self:
        """The inverse of `to_words`."""
        data = _WORDS.pack(*words[:3])
        return cls(int.from_bytes(data[:16], "big"), int.from_bytes(data[16:], "big"), words[3])
