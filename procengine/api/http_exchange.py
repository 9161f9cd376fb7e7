"""`HttpExchange`: one request's way back over an HTTP/1.1 connection.

Owns: the head and the framing of an answer. Never does: read, or know a route.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol

from procengine.api.exchange import Response

__all__ = ["ExchangeConnection", "HttpExchange"]

_REASONS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_BODILESS: Final = ("HEAD",)
_NO_CONTENT: Final = 204


class ExchangeConnection(Protocol):
    """What carries it."""

    is_paused: bool

    @property
    def is_closing(self) -> bool:
        """Whether no further request is wanted."""
        ...

    def date(self) -> str:
        """Now, as heads say it."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes."""
        ...

    def finish_exchange(self, data: bytes, keeps_alive: bool) -> None:
        """Send the last bytes of an answer, and turn to the next request."""
        ...

    def abort(self) -> None:
        """Close now."""
        ...


class HttpExchange:
    """One request's way back over its connection."""

    __slots__ = (
        "_connection",
        "_is_chunked",
        "_is_head",
        "_keeps_alive",
        "_version",
        "has_begun",
        "headers",
        "is_over",
        "on_gone",
        "on_room",
    )

    def __init__(self, connection: ExchangeConnection, method: str, version: str, keeps_alive: bool) -> None:
        self.headers: list[tuple[str, str]] = []
        self.has_begun = False
        self.is_over = False
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self._connection = connection
        self._is_head = method in _BODILESS
        self._version = version
        self._keeps_alive = keeps_alive
        self._is_chunked = False

    @property
    def is_full(self) -> bool:
        """Whether the peer reads too slowly."""
        return self._connection.is_paused

    def send(self, response: Response) -> None:
        """The whole answer, in one write."""
        if self.is_over:
            return
        about = (("Content-Length", str(len(response.body))), ("Content-Type", response.content_type))
        head = self._head(response.status, (*(about if response.status != _NO_CONTENT else ()), *response.headers))
        self._finish(head if self._is_head else head + response.body)

    def begin(self, content_type: str) -> None:
        """The head of a stream."""
        if self.is_over:
            return
        if self._version == "1.0":
            self._keeps_alive = False
        else:
            self._is_chunked = True
        framing = (("Transfer-Encoding", "chunked"),) if self._is_chunked else ()
        # A proxy that collects a stream before it passes it on defeats it; nginx takes this header as a wish.
        extra = (("Content-Type", content_type), *framing, ("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))
        self._connection.write(self._head(200, extra))

    def write(self, data: bytes) -> None:
        """A piece of a stream."""
        if not self.is_over and data:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def end(self, data: bytes = b"") -> None:
        """The last piece."""
        if self.is_over:
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        self._finish(data)

    def cut(self) -> None:
        """End in the middle."""
        if not self.is_over:
            self.is_over = True
            self.on_gone = self.on_room = None
            self._connection.abort()

    def lose(self) -> None:
        """The peer is gone."""
        if not self.is_over:
            self.is_over = True
            on_gone, self.on_gone, self.on_room = self.on_gone, None, None
            if on_gone is not None:
                on_gone()

    def _finish(self, data: bytes) -> None:
        self.is_over = True
        self.on_gone = self.on_room = None
        self._connection.finish_exchange(data, self._keeps_alive)

    def _head(self, status: int, extra: tuple[tuple[str, str], ...]) -> bytes:
        self.has_begun = True
        if self._connection.is_closing:
            self._keeps_alive = False
        lines = [
            _REASONS.get(status) or f"HTTP/1.1 {status} \r\n",
            f"Date: {self._connection.date()}\r\nServer: procengine\r\n",
        ]
        lines += [f"{name}: {value}\r\n" for name, value in (*extra, *self.headers)]
        if not self._keeps_alive:
            lines.append("Connection: close\r\n")
        elif self._version == "1.0":
            lines.append("Connection: keep-alive\r\n")
        lines.append("\r\n")
        return "".join(lines).encode("latin-1", "replace")
