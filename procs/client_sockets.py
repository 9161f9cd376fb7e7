"""`ClientSockets`: where the clients of a process connect: a Unix socket always, and a tcp one if the group has it.

Owns: which of the two a client is reached on, and which keys may come in. Never
does: look into a message.

A client is known by its routing id. Those of the tcp socket get a prefix that no id on the Unix socket can have, so
that the two cannot take each other's answers; everybody else passes the longer ids on as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import zmq
from zmq.utils import z85

from procengine import ipc
from procengine.child import Child
from procengine.config import ListenConfig
from procengine.curve_keys import ServerKeys, load_server_keys
from procengine.procs.client_listener import ClientListener

__all__ = ["ClientSockets"]

_REMOTE: Final = b"\0\0tcp:"  # ids that begin with a zero byte are ZeroMQ's own, and those have five bytes


class ClientSockets:
    """The ROUTERs that clients connect to. `try_send` takes the ids that `on_message` was given (frame 0)."""

    def __init__(
        self,
        child: Child,
        loop: asyncio.AbstractEventLoop,
        *,
        max_message_bytes: int,
        max_unsent: int = 0,
        max_unread: int = 0,
        on_come: Callable[[], None] | None = None,
        on_go: Callable[[], None] | None = None,
    ) -> None:
        """Those of the role that `child` is; messages wait until `start`. `on_come` and `on_go` as `ClientListener`."""
        self._loop = loop
        self._outputs = child.endpoint("output")
        limits = {"max_message_bytes": max_message_bytes, "max_unsent": max_unsent, "max_unread": max_unread}
        endpoint, max_clients = child.endpoint(child.role), child.config.limits.max_clients
        self._listener = ClientListener.bind(
            loop, child.context, endpoint, max_clients, on_come=on_come, on_go=on_go, **limits
        )
        self._local = self._listener.socket
        self._remote: zmq.Socket[bytes] | None = None
        self._remote_listener: ClientListener | None = None
        self._remote_outputs = ""
        self._doorkeeper: Doorkeeper | None = None  # kept: it must answer as long as there are connections
        self._readers: list[ipc.SocketReader] = []
        if child.config.listen is not None:
            self._remote = self._listen(child, child.config.listen, limits)
            self._remote_listener = ClientListener(loop, self._remote, max_clients, on_come=on_come, on_go=on_go)

    def _listen(self, child: Child, listen: ListenConfig, limits: Mapping[str, int]) -> zmq.Socket[bytes]:
        assert child.listen_fd is not None  # the supervisor made it
        keys = None if listen.curve_keys is None else load_server_keys(listen.curve_keys)
        self._doorkeeper = None if keys is None else Doorkeeper(self._loop, child.context, keys)
        self._remote_outputs = listen.output
        endpoint = listen.output if child.role == "output" else listen.frontend
        return ipc.bind_tcp(child.context, zmq.ROUTER, endpoint, child.listen_fd, server=keys, **limits)

    @property
    def num_connections(self) -> int:
        """How many there are, of both kinds."""
        return self._listener.num_connections + (
            self._remote_listener.num_connections if self._remote_listener is not None else 0
        )

    def start(self, on_message: Callable[[list[bytes]], None], after_drain: Callable[[], None] | None = None) -> None:
        """From here on messages are handed on, and `after_drain` is called behind each batch of them."""
        self._readers.append(ipc.SocketReader(self._loop, self._local, on_message, after_drain))
        if self._remote is not None:

            def on_remote(frames: list[bytes]) -> None:
                frames[0] = _REMOTE + frames[0]
                on_message(frames)

            self._readers.append(ipc.SocketReader(self._loop, self._remote, on_remote, after_drain))

    def output_endpoint(self, client: bytes) -> str:
        """Where this client's outputs come from: by the transport that it came in by."""
        return self._remote_outputs if client.startswith(_REMOTE) else self._outputs

    def try_send(self, client: bytes, message: bytes) -> ipc.Sending:
        """Send without blocking. Call `poke` after the last one."""
        if self._remote is not None and client.startswith(_REMOTE):
            return ipc.try_send_routed(self._remote, client[len(_REMOTE) :], message)
        return ipc.try_send_routed(self._local, client, message)

    def poke(self) -> None:
        """Look for messages soon: a send may have swallowed the wake-up."""
        for reader in self._readers:
            reader.poke()


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
