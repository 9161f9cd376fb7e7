"""`HttpServer`: accepts on a listening socket and keeps the connections.

Owns: the set of connections, how many there may be, their deadlines, and the orderly end. Never does: parse, or know a
route. Time is looked at once every few seconds, and only while there are connections.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Final

from procengine.api.exchange import Exchange, HttpRequest, Response
from procengine.api.http_connection import HttpConnection

__all__ = ["HttpServer"]

_SWEEP_S: Final = 2.0
_NUM_REFUSED: Final = 16  # connections over the limit that are told so, at once; further ones are cut
_BACKLOG: Final = 4096
_HANDSHAKE_S: Final = 15.0


class HttpServer:
    """One listening socket's connections. `answer` and `refusal` are what `ConnectionOwner` says."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: Callable[[HttpRequest, Exchange], None],
        refusal: Callable[[int, str], Response],
        *,
        max_connections: int,
        max_body_bytes: int,
    ) -> None:
        self.max_body_bytes = max_body_bytes
        self.is_closing = False
        self.answer = answer
        self.refusal = refusal
        self._loop = loop
        self._max_connections = max_connections
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.AbstractServer | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._on_empty: Callable[[], None] | None = None
        self._date = (0, "")

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def open(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept from here on."""
        timeout = _HANDSHAKE_S if tls is not None else None
        if listener.family == socket.AF_UNIX:
            self._server = await self._loop.create_unix_server(
                self._new_connection, sock=listener, backlog=_BACKLOG, ssl=tls, ssl_handshake_timeout=timeout
            )
        else:
            self._server = await self._loop.create_server(
                self._new_connection, sock=listener, backlog=_BACKLOG, ssl=tls, ssl_handshake_timeout=timeout
            )

    def add(self, connection: HttpConnection) -> bool:
        """Take in a new connection. False: there are too many."""
        if len(self._connections) >= self._max_connections + _NUM_REFUSED:
            connection.abort()
        self._connections.add(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_SWEEP_S, self._close_late)
        return len(self._connections) <= self._max_connections

    def discard(self, connection: HttpConnection) -> None:
        """A connection is closed."""
        self._connections.discard(connection)
        if not self._connections and self._on_empty is not None:
            on_empty, self._on_empty = self._on_empty, None
            on_empty()

    def date(self) -> str:
        """Now, as heads say it; made once a second."""
        now_s = int(time.time())
        if self._date[0] != now_s:
            self._date = (now_s, formatdate(now_s, usegmt=True))
        return self._date[1]

    def close(self, on_empty: Callable[[], None]) -> None:
        """Accept no more, end connections behind what they are being answered; `on_empty` is called behind the last."""
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            if connection.is_idle:
                connection.close()
        if self._connections:
            self._on_empty = on_empty
        else:
            on_empty()

    def _new_connection(self) -> HttpConnection:
        return HttpConnection(self, self._loop)

    def _close_late(self) -> None:
        self._sweep = None
        now_s = self._loop.time()
        for connection in [one for one in self._connections if one.deadline_s <= now_s]:
            connection.abort()
        if self._connections:
            self._sweep = self._loop.call_later(_SWEEP_S, self._close_late)
