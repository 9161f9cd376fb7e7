"""`LoraLink`: asks the supervisor to have LoRA adapters loaded and unloaded.

Owns: the questions that wait for an answer. Never does: know which adapters there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from procengine import ipc
from procengine.messages import LoadLora, LoraChanged, UnloadLora, decode_lora_changed, encode

__all__ = ["LoraLink"]


class LoraLink:
    """Asks over a socket of its own. The supervisor answers everything; if it dies, so do we."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: zmq.Context[zmq.Socket[bytes]], control_endpoint: str
    ) -> None:
        self._loop = loop
        self._socket = ipc.connect(context, zmq.DEALER, control_endpoint)
        self._reader = ipc.SocketReader(loop, self._socket, self._on_answer)
        self._answers: dict[int, asyncio.Future[LoraChanged]] = {}
        self._next_id = 0

    async def load(self, name: str, path: str) -> LoraChanged:
        """When all workers have it, or one cannot."""
        return await self._ask(lambda ask_id: LoadLora(ask_id, name, path))

    async def unload(self, name: str) -> LoraChanged:
        """When the requests that have it have ended."""
        return await self._ask(lambda ask_id: UnloadLora(ask_id, name))

    async def _ask(self, question: Callable[[int], LoadLora | UnloadLora]) -> LoraChanged:
        ask_id, self._next_id = self._next_id, self._next_id + 1
        answer: asyncio.Future[LoraChanged] = self._loop.create_future()
        self._answers[ask_id] = answer
        self._socket.send(encode(question(ask_id)))
        self._reader.poke()
        return await answer

    def _on_answer(self, frames: list[bytes]) -> None:
        changed = decode_lora_changed(frames[0])
        answer = self._answers.pop(changed.ask_id, None)
        if answer is not None and not answer.done():
            answer.set_result(changed)
