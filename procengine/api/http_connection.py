"""`HttpConnection`: HTTP/1.1 on one connection, parsed by llhttp (`httptools`).

Owns: framing, keep-alive, limits of what is read, and noticing that the peer is gone. Never does: know a route.

Requests on a connection are answered one after the other. A peer that closes its side is gone, also one that only says
that it will send no more: a process that waits for an answer keeps its side open, and which of the two it is cannot be
told before something is written. (RFC 9112 leaves that to us.)
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final, Protocol

import httptools

from procengine.api.exchange import Exchange, HttpRequest, Response
from procengine.api.http_exchange import HttpExchange

__all__ = ["ConnectionOwner", "HttpConnection"]

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
_VERSIONS: Final = ("1.0", "1.1")


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
        self._num_headers = 0
        self._num_body_bytes = 0
        self._is_past_head = False
        self._is_repeated = False  # the head that is parsed is one of ours, so that the parser reads the body

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
        if not self._is_repeated:
            self._reset_request()
        self.deadline_s = self._loop.time() + _READ_S

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        if not self._is_repeated:
            self._url += url
            self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer: what comes behind a body is nothing that its sender was authorized by."""
        if self._is_repeated:
            return
        self._count_head(len(name) + len(value))
        self._num_headers += 1
        if self._num_headers > _MAX_HEADERS:
            self._refuse(431, f"more than {_MAX_HEADERS} header fields")
        elif not self._is_past_head:
            self._add_header(name, value)

    def _add_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        known = self._headers.get(key)
        self._headers[key] = text if known is None else f"{known}, {text}"
        if key == "host" and known is not None:
            self._refuse(400, "Host: must be there once")

    def on_headers_complete(self) -> None:
        """The head is here: refuse a body that is too large before it is sent."""
        self._is_past_head = True
        if self._is_repeated:
            self._is_repeated = False
            return
        version, length = self._parser.get_http_version(), self._headers.get("content-length", "")
        if version not in _VERSIONS:
            self._refuse(505, f"HTTP/{version} is not spoken here; {' and '.join(_VERSIONS)} are")
        elif version == "1.1" and "host" not in self._headers:
            self._refuse(400, "Host: must be there once")  # RFC 9112, 3.2
        elif length.isdigit() and (len(length) > 18 or int(length) > self._owner.max_body_bytes):
            self._refuse_body(length)
        elif version == "1.1" and self._headers.get("expect", "").lower() == "100-continue" and not self._is_deaf:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._body.append(data)
        self._num_body_bytes += len(data)
        if self._num_body_bytes > self._owner.max_body_bytes:
            self._refuse_body(f"more than {self._owner.max_body_bytes}")

    def on_message_complete(self) -> None:
        """The request is here."""
        if self._is_deaf or self._is_upgrade():
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
        self._num_head_bytes = self._num_headers = self._num_body_bytes = 0
        self._is_past_head = False

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            self._refuse(431, f"the head of the request has more than {_MAX_HEAD_BYTES} bytes")

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as paused:
            if self._is_upgrade() and not self._is_deaf:
                self._pass_over_upgrade(data[paused.args[0] :])
            else:
                self._is_deaf = True
                if self._exchange is None:
                    self._hang_up()
        except httptools.HttpParserError as error:
            if not self._is_deaf:
                self._refuse(400, f"not HTTP/1.1: {error}")

    def _is_upgrade(self) -> bool:
        """Whether the head asks for another protocol, of which we know none."""
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def _pass_over_upgrade(self, rest: bytes) -> None:
        """Go on in HTTP/1.1. The parser has left out the body: it gets the head again, without that wish."""
        kept = ("content-length", "transfer-encoding")
        lines = [f"{name}: {self._headers[name]}\r\n" for name in kept if name in self._headers]
        if "close" in self._headers.get("connection", "").lower():
            lines.append("Connection: close\r\n")
        first = f"{self._parser.get_method().decode('latin-1')} / HTTP/{self._parser.get_http_version()}\r\n"
        self._is_repeated = True
        self._parser = httptools.HttpRequestParser(self)  # the old one takes nothing behind `Connection: close`
        self._feed("".join((first, *lines, "\r\n")).encode("latin-1"))
        if not rest:
            return
        if self._exchange is None:
            self._feed(rest)
        else:
            self._waiting.append(rest)

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
