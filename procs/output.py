"""The output process: results of workers in, text for clients out.

Wiring only: it moves messages between sockets and the pure parts. It takes in all results that wait before it makes one
message a client of them, so that a burst costs one message and not many.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import msgspec
import numpy as np
import uvloop
import zmq

from procengine import ipc
from procengine.child import Child, run_child
from procengine.detokenizer import Detokenizer
from procengine.embed_outputs import EmbedOutputs
from procengine.messages import (
    PROTOCOL_VERSION,
    Admitted,
    Attached,
    ChildStats,
    ClientGone,
    Delta,
    Drain,
    Embedding,
    EmbedResult,
    Finish,
    Outputs,
    Query,
    Register,
    Replay,
    Resync,
    Shutdown,
    StepResult,
    TextStop,
    WorkerReady,
    decode_from_frontend,
    decode_from_output_peer,
    decode_from_supervisor,
    decode_from_worker,
    encode,
)
from procengine.text_outputs import TextOutputs
from procengine.tokenizer import Tokenizer

__all__ = ["main"]

_NICENESS = 5  # when cores are scarce, text may be late; the loop that feeds the device may not


class Output:
    """The sockets and what hangs between them. Everything runs on the loop's thread."""

    def __init__(self, child: Child, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        self._child = child
        self._on_end = on_end
        self._text = TextOutputs(Detokenizer(Tokenizer.load(child.config.model.tokenizer_path)))
        self._embeddings = EmbedOutputs()
        self._items_by_client: dict[bytes, list[Delta | Embedding]] = {}
        context = child.context
        self._client_socket = ipc.bind(context, zmq.ROUTER, child.endpoint("output"))
        self._to_frontend = ipc.connect(context, zmq.PUSH, child.endpoint("feedback"))
        from_frontend = ipc.connect(context, zmq.PULL, child.endpoint("register"))
        results = ipc.bind(context, zmq.PULL, child.endpoint("text"))
        self._registers = ipc.SocketReader(loop, from_frontend, self._on_frontend, self._flush)
        self._results = ipc.SocketReader(loop, results, self._on_result, self._flush)
        self._clients = ipc.SocketReader(loop, self._client_socket, self._on_client)
        self._control = ipc.SocketReader(loop, child.control, self._on_control)
        child.say_ready({})

    def _on_frontend(self, frames: list[bytes]) -> None:
        match decode_from_frontend(frames[0]):
            case Register(workflow="embed") as register:
                if (answer := self._embeddings.register(register)) is not None:
                    self._add(*answer)
            case Register() as register:
                self._text.register(register)
            case Admitted(keys, num_cached_tokens):
                for key, count in zip(keys, num_cached_tokens, strict=True):
                    self._text.admit(key, count)
            case Finish(key, finish_reason, error):
                self._finish(key, finish_reason, error)
            case Replay(key, position, token_ids):
                self._text.replay(key, position, token_ids)

    def _on_result(self, frames: list[bytes]) -> None:
        header = decode_from_worker(frames[0])
        if isinstance(header, WorkerReady):
            return
        payload = np.frombuffer(frames[1], np.int32)
        if isinstance(header, StepResult):
            for key, position in self._text.take_result(header, payload):
                self._to_frontend.send(encode(Resync(key, position)))
        else:
            self._take_vectors(header, payload)

    def _take_vectors(self, header: EmbedResult, payload: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        for client, embedding in self._embeddings.take_result(header, payload):
            self._add(client, embedding)

    def _flush(self) -> None:
        """Send what is new, one message a client."""
        taken = self._text.take_deltas()
        for key in taken.text_stopped_keys:
            self._to_frontend.send(encode(TextStop(key)))
        for client, deltas in taken.deltas_by_client.items():
            self._items_by_client.setdefault(client, []).extend(deltas)
        items_by_client, self._items_by_client = self._items_by_client, {}
        for client, items in items_by_client.items():
            if not ipc.send_routed(self._client_socket, client, encode(Outputs(items))):
                self._drop_client(client)
        if items_by_client:
            self._clients.poke()

    def _add(self, client: bytes, item: Delta | Embedding) -> None:
        self._items_by_client.setdefault(client, []).append(item)

    def _finish(self, key: int, finish_reason: str, error: str | None) -> None:
        ended = self._text.finish(key, finish_reason, error) or self._embeddings.finish(key, finish_reason, error)
        if ended is not None:
            client, items = ended
            for item in items:
                self._add(client, item)

    def _drop_client(self, client: bytes) -> None:
        for outputs in (self._text, self._embeddings):
            for key in outputs.keys_of_client(client):
                outputs.finish(key, "abort")
        self._to_frontend.send(encode(ClientGone(client)))

    def _on_client(self, frames: list[bytes]) -> None:
        try:
            decode_from_output_peer(frames[-1])
        except msgspec.DecodeError:
            return  # not of this protocol: whoever it is has no requests here
        ipc.send_routed(self._client_socket, frames[0], encode(Attached(PROTOCOL_VERSION)))
        self._clients.poke()

    def _on_control(self, frames: list[bytes]) -> None:
        match decode_from_supervisor(frames[0]):
            case Query(query_id):
                depth = self._text.num_unfinished + self._embeddings.num_unfinished
                self._child.control.send(encode(ChildStats(query_id, "ready", depth)))
                self._control.poke()
            case Shutdown(error):
                for outputs in (self._text, self._embeddings):
                    for key in outputs.all_keys():
                        self._finish(key, "error" if error else "abort", error)
                self._flush()
                self._on_end()
            case Drain():  # draining is the frontend's business
                pass


def main(child: Child) -> None:
    """Serve until the supervisor says stop or is gone."""
    os.nice(_NICENESS)
    loop = uvloop.new_event_loop()
    loop.add_reader(child.death_fd, lambda: os._exit(1))
    Output(child, loop, loop.stop)
    loop.run_forever()
    child.context.destroy(linger=1000)


if __name__ == "__main__":
    run_child("output", main)
