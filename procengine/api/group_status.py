"""`GroupStatus`: how the processes of the group are, by the supervisor's word.

Owns: one question at a time, whoever waits for it. Never does: look at a process itself.
"""

from __future__ import annotations

import asyncio
from typing import Final

import zmq

from procengine import ipc
from procengine.messages import GetStatus, Status, decode_status, encode

__all__ = ["GroupStatus"]

_TIMEOUT_S: Final = 3.0  # the supervisor gives its children one


class GroupStatus:
    """Asks over a socket of its own."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: zmq.Context[zmq.Socket[bytes]], control_endpoint: str
    ) -> None:
        self._loop = loop
        self._socket = ipc.connect(context, zmq.DEALER, control_endpoint)
        self._reader = ipc.SocketReader(loop, self._socket, self._on_answer)
        self._answer: asyncio.Future[Status] | None = None

    async def ask(self) -> Status | None:
        """Every process's state now; None if the supervisor does not answer."""
        if self._answer is None:
            self._answer = self._loop.create_future()
            self._socket.send(encode(GetStatus()))
            self._reader.poke()
        answer = self._answer
        try:
            return await asyncio.wait_for(asyncio.shield(answer), _TIMEOUT_S)
        except TimeoutError:
            if self._answer is answer:
                self._answer = None  # an answer that still comes is to nobody's question
            return None

    def _on_answer(self, frames: list[bytes]) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(decode_status(frames[0]))
