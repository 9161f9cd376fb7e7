"""What a route is given and what it answers with, whatever carries them: a connection, or a file of requests.

Owns: the shapes. Never does: read or write a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["EVENT_STREAM", "EVENT_STREAM_KIND", "JSON", "Exchange", "HttpRequest", "Response"]

JSON = "application/json"
EVENT_STREAM_KIND = "text/event-stream"
EVENT_STREAM = f"{EVENT_STREAM_KIND}; charset=utf-8"


@dataclass(slots=True)
class HttpRequest:
    """One request, whole. Names of headers are in lower case; one that came several times is joined with commas."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """One answer, whole."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


class Exchange(Protocol):
    """One request's way back. After `send` or `end`, or when the peer is gone, nothing that is called has an effect.

    Attributes:
        headers: go with the answer, whichever it will be.
        has_begun: a head was sent, so the status is said.
        is_over: it is answered, or nobody is there.
        is_full: the peer reads more slowly than we write; `on_room` is called when that has changed.
        on_gone: is called when the peer has left before the end.
    """

    headers: list[tuple[str, str]]
    has_begun: bool
    is_over: bool
    on_gone: Callable[[], None] | None
    on_room: Callable[[], None] | None

    @property
    def is_full(self) -> bool: ...

    def send(self, response: Response) -> None:
        """The whole answer."""
        ...

    def begin(self, content_type: str) -> None:
        """The head of an answer that comes in pieces."""
        ...

    def write(self, data: bytes) -> None:
        """A piece."""
        ...

    def end(self, data: bytes = b"") -> None:
        """The last piece."""
        ...

    def cut(self) -> None:
        """End in the middle, so that the peer sees that this is no end."""
        ...
