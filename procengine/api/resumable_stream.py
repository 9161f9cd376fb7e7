"""`ResumableStream`: a streamed answer that outlives its connection for a while, and the next one goes on with it.

Owns: which connection gets it, the window without one, and that its end is told once. Never does: know what is said, or
which streams there are (`ResumableStreams`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from procengine.api.errors import ApiError, bad_request
from procengine.api.event_log import EventLog
from procengine.api.exchange import EVENT_STREAM, Exchange, Response

__all__ = ["WINDOW_HEADER", "ResumableStream"]

WINDOW_HEADER: Final = "X-Procengine-Resume-Window"


class ResumableStream:
    """An `Exchange` for the job that answers; `attach` gives it a connection.

    `on_forgotten` is called when no connection can come back to it any more.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, window_s: int, max_bytes: int, on_forgotten: Callable[[], None]
    ) -> None:
        self.headers: list[tuple[str, str]] = []
        self.has_begun = False
        self.is_over = False
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self._loop = loop
        self._window_s = window_s
        self._on_forgotten = on_forgotten
        self._log = EventLog(max_bytes)
        self._exchange: Exchange | None = None
        self._refusal: Response | None = None  # nobody was there to be told
        self._timer: asyncio.TimerHandle | None = None

    # --- of the job

    @property
    def is_full(self) -> bool:
        """Whether the peer reads too slowly. Without a peer nobody has to be spared: what is kept is bounded."""
        return self._exchange is not None and self._exchange.is_full

    def send(self, response: Response) -> None:
        """An error instead of a stream. Once somebody has been told, the request's id is free for another try."""
        self._finish()
        if self._exchange is None:
            self._refusal = response
        else:
            self._exchange.send(response)
            self.forget()

    def begin(self, content_type: str) -> None:
        """The stream begins."""
        self.has_begun = True
        if self._exchange is not None:
            self._exchange.begin(content_type)

    def write(self, data: bytes) -> None:
        """Events."""
        numbered = self._log.add(data)
        if self._exchange is not None:
            self._exchange.write(numbered)

    def end(self, data: bytes = b"") -> None:
        """The last events. They are kept for the window: who is being told may be losing the connection now."""
        numbered = self._log.add(data)
        self._finish()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(numbered)
            self._await_peer()

    def cut(self) -> None:
        """Nobody else gets what this gets."""
        raise AssertionError("a job does not end in the middle")

    # --- of connections

    def attach(self, exchange: Exchange, after: int) -> None:
        """From now on this connection gets the answer, from the event behind `after` on. One that had it loses it.

        Raises:
            ApiError: there is no such event, or it is not kept any more.
        """
        if after > self._log.last:
            raise bad_request(f"Last-Event-ID: {after} has not been sent; the last one is {self._log.last}")
        missed = self._log.since(after)
        if missed is None:
            raise ApiError(410, f"the events behind {after} are not kept any more", code="events_gone")
        self._take_over(exchange)
        if self._refusal is not None:
            exchange.send(self._refusal)
            self.forget()
        elif self.is_over and after == self._log.last:
            self._exchange = None
            exchange.send(Response(204, b""))  # the end is known there: it is not told again
            self._await_peer()
        elif self.has_begun:
            exchange.begin(EVENT_STREAM)
            self._replay(exchange, missed)

    def abandon(self) -> None:
        """Nobody wants it any more."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cut()
        on_gone = self.on_gone
        self._finish()
        self.forget()
        if on_gone is not None:
            on_gone()

    def forget(self) -> None:
        """It cannot be attached to any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_forgotten()

    # --- inside

    def _finish(self) -> None:
        self.is_over = True
        self.on_gone = self.on_room = None

    def _take_over(self, exchange: Exchange) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._exchange is not None:
            self._exchange.cut()
        self._exchange = exchange
        exchange.headers.append((WINDOW_HEADER, str(self._window_s)))
        exchange.on_gone = self._lose
        exchange.on_room = self._tell_room

    def _replay(self, exchange: Exchange, missed: bytes) -> None:
        if self.is_over:
            self._exchange = None
            exchange.end(missed)
            self._await_peer()
        else:
            exchange.write(missed)

    def _lose(self) -> None:
        self._exchange = None
        self._await_peer()
        self._tell_room()  # what waited for a slow peer is kept here now

    def _tell_room(self) -> None:
        if self.on_room is not None:
            self.on_room()

    def _await_peer(self) -> None:
        self._timer = self._loop.call_later(self._window_s, self.abandon)
