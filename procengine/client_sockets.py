"""`ClientSockets`: where the clients of a process connect: a Unix socket always, and a tcp one if the group has it.

Owns: which of the two a client is reached on, and which keys may come in. Never
does: look into a message.

A client is known by its routing id. Those of the tcp socket get a prefix that no id on the Unix socket can have, so
that the two cannot take each other's answers; everybody else passes the longer ids on as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from procengine import ipc
from procengine.child import Child
from procengine.curve_keys import ServerKeys, load_server_keys

__all__ = ["ClientSockets"]

_REMOTE: Final = b"\0\0tcp:"  # ids that begin with a zero byte are ZeroMQ's own, and those have five bytes

OnMessage = Callable[[list[bytes]], None]


class ClientSockets:
    """The ROUTERs that clients connect to, on a loop. `send` takes the ids that `on_message` was given (frame 0)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        local: zmq.Socket[bytes],
        remote: zmq.Socket[bytes] | None,
        on_message: OnMessage,
        after_drain: Callable[[], None] | None,
        local_outputs: str,
        remote_outputs: str = "",
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        self._local_outputs = local_outputs
        self._remote_outputs = remote_outputs
        self._doorkeeper = doorkeeper  # kept: it must answer as long as there are connections
        self._local = local
        self._remote = remote
        self._on_message = on_message
        self._readers = [ipc.SocketReader(loop, local, on_message, after_drain)]
        if remote is not None:
            self._readers.append(ipc.SocketReader(loop, remote, self._on_remote, after_drain))

    @classmethod
    def open(
        cls,
        child: Child,
        loop: asyncio.AbstractEventLoop,
        max_message_bytes: int,
        on_message: OnMessage,
        after_drain: Callable[[], None] | None = None,
    ) -> ClientSockets:
        """Those of a process of the group, at its role's endpoints."""
        local = ipc.bind(child.context, zmq.ROUTER, child.endpoint(child.role), max_message_bytes=max_message_bytes)
        listen, outputs = child.config.listen, child.endpoint("output")
        if listen is None:
            return cls(loop, local, None, on_message, after_drain, outputs)
        assert child.listen_fd is not None  # the supervisor made it
        keys = None if listen.curve_keys is None else load_server_keys(listen.curve_keys)
        doorkeeper = None if keys is None else Doorkeeper(loop, child.context, keys)
        endpoint = listen.output if child.role == "output" else listen.frontend
        remote = ipc.bind_tcp(
            child.context, zmq.ROUTER, endpoint, child.listen_fd, max_message_bytes=max_message_bytes, server=keys
        )
        return cls(loop, local, remote, on_message, after_drain, outputs, listen.output, doorkeeper)

    def output_endpoint(self, client: bytes) -> str:
        """Where this client's outputs come from: the transport that it came in by."""
        return self._remote_outputs if client.startswith(_REMOTE) else self._local_outputs

    def send(self, client: bytes, message: bytes) -> bool:
        """Send without blocking. False: the client is gone. Call `poke` after the last one."""
        if self._remote is not None and client.startswith(_REMOTE):
            return ipc.send_routed(self._remote, client[len(_REMOTE) :], message)
        return ipc.send_routed(self._local, client, message)

    def poke(self) -> None:
        """Look for messages soon: a send may have swallowed the wake-up."""
        for reader in self._readers:
            reader.poke()

    def _on_remote(self, frames: list[bytes]) -> None:
        frames[0] = _REMOTE + frames[0]
        self._on_message(frames)


class Doorkeeper:
    """Says which keys may come in. It must be there before the first connection is."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys
    ) -> None:
        self._allowed = frozenset(z85.decode(key) for key in keys.clients.values())
        self._socket = ipc.bind(context, zmq.ROUTER, ipc.KEY_QUESTIONS)
        self._reader = ipc.SocketReader(loop, self._socket, self._answer)

    def _answer(self, frames: list[bytes]) -> None:
        peer, empty, version, request_id, domain, _address, _identity, mechanism, *credentials = frames
        is_known = domain == ipc.KEY_DOMAIN and mechanism == b"CURVE" and self._allowed.issuperset(credentials)
        code, text = (b"200", b"") if is_known and credentials else (b"400", b"unknown key")
        self._socket.send_multipart([peer, empty, version, request_id, code, text, b"", b""])
        self._reader.poke()
