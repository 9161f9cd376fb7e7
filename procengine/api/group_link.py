"""`GroupLink`: the front door's connection to its group, on one loop, without a task a request.

Owns: the two sockets and the order in which news is handed out: all that is here is sorted into its requests, and then
each request with news is told once. So what several steps brought becomes one write to its client.
Never does: know the protocol (`ClientCore`), wait, or watch the group's life: the supervisor is our parent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import zmq

from procengine import ipc
from procengine.client_bodies import Body
from procengine.client_core import ClientCore, Pending
from procengine.client_link import new_identity
from procengine.errors import EngineDeadError, ProcengineError
from procengine.messages import Welcome

__all__ = ["GroupLink", "OnNews", "Work"]

OnNews = Callable[["Work"], None]
_ATTACH_AGAIN_S: Final = 0.5


class Work:
    """One request to the group. `on_news` is called on the loop when items came, and when it ended."""

    __slots__ = ("_due", "_is_due", "_on_news", "index", "pending")

    def __init__(self, due: list[Work], on_news: OnNews, index: int) -> None:
        self.pending: Pending | None = None
        self.index = index  # which of its HTTP request's it is
        self._due = due
        self._on_news = on_news
        self._is_due = False

    @property
    def request(self) -> Pending:
        """What came for it so far."""
        assert self.pending is not None
        return self.pending

    def note(self, _: Pending | None = None) -> None:
        """Something came: it will be told when everything that is here is sorted."""
        if not self._is_due:
            self._is_due = True
            self._due.append(self)

    def tell(self) -> None:
        """Tell it."""
        self._is_due = False
        self._on_news(self)


class GroupLink:
    """A client of the group. `on_attached` is called once, when requests can be sent."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        frontend_endpoint: str,
        on_attached: Callable[[Welcome], None],
    ) -> None:
        self.welcome: Welcome | None = None
        self.is_attached = False
        self._loop = loop
        self._context = context
        self._on_attached = on_attached
        self._core = ClientCore()
        self._due: list[Work] = []
        self._identity = new_identity()
        self._frontend, self._from_frontend = self._connect(frontend_endpoint, self._on_frontend)
        disconnects = ipc.disconnects_of(self._frontend)
        self._disconnects = ipc.SocketReader(loop, disconnects, self._on_disconnect)
        self._output: zmq.Socket[bytes] | None = None
        self._from_output: ipc.SocketReader | None = None
        self._attach_timer: asyncio.TimerHandle | None = None
        _, frame = self._core.hello(self._on_welcome)
        self._send(frame)

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._core.running_ids())

    def submit(
        self,
        workflow: str,
        body: Body,
        on_news: OnNews,
        index: int = 0,
        traceparent: str = "",
        *,
        is_collected: bool = False,
    ) -> Work:
        """Start a request. One that `is_collected` until its end may begin anew with another frontend.

        Raises:
            InvalidRequestError: it cannot be sent; names the field.
            EngineDeadError: the group has died, or is not there yet.
        """
        if not self.is_attached:
            raise EngineDeadError("the group is not ready yet")
        work = Work(self._due, on_news, index)
        work.pending, frame = self._core.submit(
            workflow, body, None, work.note, work.note, time.monotonic_ns(), traceparent, is_collected=is_collected
        )
        self._send(frame)
        return work

    def abandon(self, work: Work) -> None:
        """Nobody waits for this any more: what still runs of it is aborted."""
        frame = self._core.abandon(work.request)
        if frame is not None:
            self._send(frame)

    def die(self, error: ProcengineError) -> None:
        """The group ends: what runs fails, what comes is refused."""
        if self._from_output is not None:
            self._from_output.drain()
        self._core.die(error)
        self._tell()

    def close(self) -> None:
        """Stop listening; the sockets go with their context."""
        if self._attach_timer is not None:
            self._attach_timer.cancel()
        for reader in (self._from_frontend, self._disconnects, self._from_output):
            if reader is not None:
                reader.close()

    def _connect(
        self, endpoint: str, on_frames: Callable[[list[bytes]], None]
    ) -> tuple[zmq.Socket[bytes], ipc.SocketReader]:
        socket = ipc.connect(self._context, zmq.DEALER, endpoint, identity=self._identity)
        return socket, ipc.SocketReader(self._loop, socket, on_frames, self._tell)

    def _send(self, frame: bytes) -> None:
        self._frontend.send(frame)
        self._from_frontend.poke()  # a send may swallow the wake-up for a message that came meanwhile

    def _on_frontend(self, frames: list[bytes]) -> None:
        if self._from_output is not None:
            self._from_output.drain()  # what the frontend says of a request's end comes behind its last texts
        self._on_output(frames)

    def _on_output(self, frames: list[bytes]) -> None:
        self._core.receive(frames[0], time.monotonic_ns())
        for frame in self._core.take_frames():
            self._send(frame)

    def _on_disconnect(self, _: list[bytes]) -> None:
        self._send(self._core.hello_again())  # it may be another one that we are connected to next

    def _tell(self) -> None:
        """Hand out the news. Who is told may submit and abandon, and so bring more."""
        due = self._due
        while due:
            told = due.copy()
            due.clear()
            for work in told:
                work.tell()

    def _on_welcome(self, question: Pending) -> None:
        self.welcome = question.answer(Welcome)
        self._output, self._from_output = self._connect(self.welcome.output_endpoint, self._on_output)
        _, frame = self._core.attach(self._on_attach_answer)
        self._attach(frame)

    def _attach(self, frame: bytes) -> None:
        """Until an output process answers: one that was asked may have died meanwhile."""
        assert self._output is not None and self._from_output is not None
        self._output.send(frame)
        self._from_output.poke()
        self._attach_timer = self._loop.call_later(_ATTACH_AGAIN_S, self._attach, self._core.attach_again())

    def _on_attach_answer(self, _: Pending) -> None:
        assert self._attach_timer is not None and self.welcome is not None
        self._attach_timer.cancel()
        self._attach_timer = None
        self.is_attached = True
        self._on_attached(self.welcome)
