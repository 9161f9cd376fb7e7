"""`HttpConnection`: HTTP/1.1 on one connection, parsed by llhttp (`httptools`), and `HttpExchange`, one request on it.

Owns: framing, keep-alive, limits of what is read, and noticing that the peer is gone. Never does: know a route.

Requests on a connection are answered one after the other. A peer that closes its side is gone, also one that only says
that it will send no more: a process that waits for an answer keeps its side open, and which of the two it is cannot be
told before something is written. (RFC 9112 leaves that to us.)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Protocol

import httptools

from procengine.api.exchange import Exchange, HttpRequest, Response

__all__ = ["ConnectionOwner", "HttpConnection", "HttpExchange"]

_MAX_HEAD_BYTES: Final = 65536
_MAX_HEADERS: Final = 128
_MAX_PIPELINED: Final = 16
_MAX_WAITING_BYTES: Final = 1 << 20
_READ_S: Final = 60.0  # for one request, from its first byte to its last
_IDLE_S: Final = 75.0  # between two requests
_STALLED_S: Final = 120.0  # of a peer that does not take what is written
_LINGER_S: Final = 2.0  # for a peer that is refused in the middle of a request to read why
_HIGH_WATER_BYTES: Final = 256 << 10
_NEVER: Final = float("inf")
_REASONS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_BODILESS: Final = ("HEAD",)
_NO_CONTENT: Final = 204


class ConnectionOwner(Protocol):
    """Who makes connections."""

    max_body_bytes: int
    is_closing: bool

    def add(self, connection: HttpConnection) -> bool:
        """Take in a new one. False: there are too many."""
        ...

    def discard(self, connection: HttpConnection) -> None:
        """It is closed."""
        ...

    def answer(self, request: HttpRequest, exchange: Exchange) -> None:
        """Answer a request, now or later. Lets no exception out."""
        ...

    def refusal(self, status: int, message: str) -> Response:
        """The answer to what is no request."""
        ...

    def date(self) -> str:
        """Now, as heads say it."""
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

    def __init__(self, connection: HttpConnection, method: str, version: str, keeps_alive: bool) -> None:
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


class HttpConnection(asyncio.Protocol):
    """One connection. `deadline_s` is when its owner may close it, on the loop's clock."""

    def __init__(self, owner: ConnectionOwner, loop: asyncio.AbstractEventLoop) -> None:
        self.deadline_s = _NEVER
        self.is_paused = False
        self._owner = owner
        self._loop = loop
        self._transport: Any = None
        self._parser = httptools.HttpRequestParser(self)
        self._exchange: HttpExchange | None = None
        self._parsed: deque[tuple[HttpRequest, HttpExchange]] = deque()
        self._waiting: list[bytes] = []  # came while a request was being answered
        self._is_deaf = False  # the connection ends behind the answer; what still comes is not read
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._num_head_bytes = 0
        self._num_body_bytes = 0

    @property
    def is_closing(self) -> bool:
        """Whether no further request is wanted."""
        return self._is_deaf or self._owner.is_closing

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being answered."""
        return self._exchange is None

    def date(self) -> str:
        """Now, as heads say it."""
        return self._owner.date()

    # --- of the loop

    def connection_made(self, transport: Any) -> None:
        """A peer is there."""
        self._transport = transport
        transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self.deadline_s = self._loop.time() + _READ_S
        if not self._owner.add(self):
            self._refuse(503, "too many connections; try again later")

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._is_deaf:
            return
        if self._exchange is not None:
            self._waiting.append(data)
            if sum(map(len, self._waiting)) > _MAX_WAITING_BYTES:
                self.abort()
            return
        self._feed(data)

    def eof_received(self) -> bool:
        """The peer will send no more: it is gone."""
        if self._exchange is not None:
            self._exchange.lose()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is no more."""
        self._is_deaf = True
        self._owner.discard(self)
        if self._exchange is not None:
            self._exchange.lose()

    def pause_writing(self) -> None:
        """More is written than the peer has taken."""
        self.is_paused = True
        self.deadline_s = self._loop.time() + _STALLED_S

    def resume_writing(self) -> None:
        """It has caught up."""
        self.is_paused = False
        exchange = self._exchange
        self.deadline_s = self._loop.time() + _IDLE_S if exchange is None else _NEVER
        if exchange is not None and exchange.on_room is not None:
            exchange.on_room()

    # --- of the exchange and the owner

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self._transport.write(data)

    def finish_exchange(self, data: bytes, keeps_alive: bool) -> None:
        """Send the last bytes of an answer, and turn to the next request."""
        self._transport.write(data)
        self._exchange = None
        self.deadline_s = self._loop.time() + _IDLE_S
        if not keeps_alive or self.is_closing:
            self._hang_up()
        elif self._parsed:
            self._start_next()
        elif self._waiting:
            self._loop.call_soon(self._feed_waiting)

    def close(self) -> None:
        """Close when all that was written is sent."""
        self._is_deaf = True
        self._transport.close()

    def abort(self) -> None:
        """Close now."""
        self._is_deaf = True
        self._transport.abort()

    # --- of the parser

    def on_message_begin(self) -> None:
        """A request begins."""
        self._reset_request()
        self.deadline_s = self._loop.time() + _READ_S

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._count_head(len(name) + len(value))
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        known = self._headers.get(key)
        self._headers[key] = text if known is None else f"{known}, {text}"
        if len(self._headers) > _MAX_HEADERS:
            self._refuse(431, f"more than {_MAX_HEADERS} header fields")

    def on_headers_complete(self) -> None:
        """The head is here: refuse a body that is too large before it is sent."""
        length = self._headers.get("content-length", "")
        if length.isdigit() and (len(length) > 18 or int(length) > self._owner.max_body_bytes):
            self._refuse_body(length)
        elif self._headers.get("expect", "").lower() == "100-continue" and not self._is_deaf:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._body.append(data)
        self._num_body_bytes += len(data)
        if self._num_body_bytes > self._owner.max_body_bytes:
            self._refuse_body(f"more than {self._owner.max_body_bytes}")

    def on_message_complete(self) -> None:
        """The request is here."""
        if self._is_deaf:
            return
        method, version = self._parser.get_method().decode("latin-1"), self._parser.get_http_version()
        try:
            url = httptools.parse_url(self._url)
        except httptools.HttpParserInvalidURLError:
            self._refuse(400, "the target of the request is no URL")
            return
        request = HttpRequest(
            method,
            (url.path or b"/").decode("latin-1"),
            (url.query or b"").decode("latin-1"),
            self._headers,
            self._body[0] if len(self._body) == 1 else b"".join(self._body),
        )
        self._body = []
        self._parsed.append((request, HttpExchange(self, method, version, self._parser.should_keep_alive())))
        if len(self._parsed) > _MAX_PIPELINED:
            self.abort()
        elif self._exchange is None:
            self._start_next()

    # --- inside

    def _reset_request(self) -> None:
        self._url = b""
        self._headers = {}
        self._body = []
        self._num_head_bytes = self._num_body_bytes = 0

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            self._refuse(431, f"the head of the request has more than {_MAX_HEAD_BYTES} bytes")

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._is_deaf = True  # whatever it was to be, it is answered as HTTP/1.1, and then this ends
            if self._exchange is None:
                self._hang_up()
        except httptools.HttpParserError as error:
            if not self._is_deaf:
                self._refuse(400, f"not HTTP/1.1: {error}")

    def _feed_waiting(self) -> None:
        if self._exchange is None and self._waiting and not self._is_deaf:
            data, self._waiting = b"".join(self._waiting), []
            self._feed(data)

    def _start_next(self) -> None:
        request, self._exchange = self._parsed.popleft()
        self.deadline_s = _NEVER
        self._owner.answer(request, self._exchange)

    def _refuse_body(self, size: str) -> None:
        self._refuse(413, f"the body has {size} bytes, the limit (max_request_bytes) is {self._owner.max_body_bytes}")

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is no request, behind what is still being answered, and end the connection."""
        if self._is_deaf:
            return
        self._is_deaf = True
        if self._exchange is not None:
            return  # an answer is under way; the connection ends behind it
        exchange = self._exchange = HttpExchange(self, "", "1.1", keeps_alive=False)
        exchange.send(self._owner.refusal(status, message))

    def _hang_up(self) -> None:
        """Say that nothing more is sent. The peer may be in the middle of sending: it gets some time to read first."""
        self._is_deaf = True
        if self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self.deadline_s = self._loop.time() + (_STALLED_S if self.is_paused else _LINGER_S)
        else:
            self._transport.close()
