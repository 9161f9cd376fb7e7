"""The one place that creates ZeroMQ sockets and sets their options.

Owns: socket options and the drain loop for sockets on an asyncio loop. Never does: know a message.

Facts behind the options (libzmq 4.3.5): a second `bind` on a live ipc path silently steals it, so the supervisor holds
a flock on the run directory before anything binds; a frame over MAXMSGSIZE drops the connection and the message behind
it, so senders cap sizes themselves and the receiver's limit is only a backstop; a ROUTER drops silently unless it is
told otherwise; LINGER defaults to forever; the default high-water mark of 1000 messages makes a PUSH block its process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final

import numpy as np
import zmq
from numpy.typing import NDArray

from procengine.curve_keys import ClientKeys, ServerKeys
from procengine.errors import ConfigError

__all__ = [
    "KEY_DOMAIN",
    "KEY_QUESTIONS",
    "Frames",
    "Sending",
    "SocketReader",
    "bind",
    "bind_tcp",
    "connect",
    "connect_socket",
    "disconnects_of",
    "has_message",
    "make_context",
    "monitor",
    "send_frames",
    "send_routed",
    "try_send_routed",
]

Frames = tuple[bytes, "bytes | NDArray[np.int32]"]  # a header and its payload

# Plain integers: an operation on pyzmq's flag enums costs a microsecond, and these are used several times a step.
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_SNDMORE: Final = int(zmq.SNDMORE)
_SNDMORE_NOBLOCK: Final = _SNDMORE | _NOBLOCK
_BACKLOG: Final = 100
_HEARTBEAT_MS: Final = 0  # ipc peers: the kernel reports a closed socket, heartbeats would only wake idle processes
_TCP_HEARTBEAT_MS: Final = 5_000
_TCP_SILENCE_MS: Final = 20_000
KEY_QUESTIONS: Final = "inproc://zeromq.zap.01"  # where ZeroMQ asks whether a key is known (ZAP, its RFC 27)
KEY_DOMAIN: Final = b"procengine"
_LINGER_MS: Final = 1000
_HANDSHAKE_MS: Final = 10_000
_BACKSTOP_BYTES: Final = 1 << 30
_MAX_BURST: Final = 256  # messages of one socket, before the other sockets of a loop have their turn


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context with one I/O thread, which is enough for any process of the group."""
    return zmq.Context(io_threads=1)


class Sending(Enum):
    """What became of a message to one peer."""

    SENT = auto()
    FULL = auto()  # the peer does not read, and as many messages as may wait for it do
    GONE = auto()


def bind(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    endpoint: str,
    *,
    max_message_bytes: int = _BACKSTOP_BYTES,
    max_unsent: int = 0,
    max_unread: int = 0,
    backlog: int = _BACKLOG,
) -> zmq.Socket[bytes]:
    """A socket of `kind` that listens on `endpoint`. Up to `max_unsent` messages may wait for a peer to read them, and
    `max_unread` of each peer to be read (0 is no limit), and `backlog` connections to be accepted.
    """
    socket = _make(context, kind, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, max_unsent)
    socket.setsockopt(zmq.RCVHWM, max_unread)
    socket.setsockopt(zmq.BACKLOG, backlog)
    socket.bind(endpoint)
    return socket


def bind_tcp(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    endpoint: str,
    listen_fd: int,
    *,
    max_message_bytes: int,
    max_unsent: int = 0,
    max_unread: int = 0,
    server: ServerKeys | None = None,
) -> zmq.Socket[bytes]:
    """A socket of `kind` on a tcp socket that listens already and is ZeroMQ's from here on. With keys, only peers that
    know ours get past the handshake, and only if ZAP (`KEY_QUESTIONS`) lets theirs in. Limits as for `bind`.
    """
    socket = _make(context, kind, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, max_unsent)
    socket.setsockopt(zmq.RCVHWM, max_unread)
    _set_tcp_options(socket)
    if server is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, server.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, KEY_DOMAIN)
    socket.setsockopt(zmq.USE_FD, listen_fd)
    socket.bind(endpoint)
    return socket


def connect(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    endpoint: str,
    *,
    identity: bytes | None = None,
    keys: ClientKeys | None = None,
) -> zmq.Socket[bytes]:
    """A socket of `kind` that connects to `endpoint`; `identity` is its routing id at a ROUTER.

    Raises:
        ConfigError: there is no such address, or its transport is none of ours.
    """
    socket = _make(context, kind, _BACKSTOP_BYTES)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    connect_socket(socket, endpoint, keys)
    return socket


def connect_socket(socket: zmq.Socket[bytes], endpoint: str, keys: ClientKeys | None = None) -> None:
    """Connect a socket that was made already. Raises as `connect`."""
    if endpoint.startswith("tcp://"):
        _set_tcp_options(socket)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"endpoint: cannot connect to {endpoint!r:.200}: {error.strerror}") from error


def _set_tcp_options(socket: zmq.Socket[bytes]) -> None:
    """Of a peer that was unplugged nobody tells; so it is asked now and then."""
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _TCP_HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _TCP_SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _TCP_SILENCE_MS)


def disconnects_of(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that gets a message whenever `socket`, which has connected somewhere, loses its connection."""
    monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    return monitor


def _make(context: zmq.Context[zmq.Socket[bytes]], kind: int, max_message_bytes: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    # Unbounded pipes: bounds are set where a queue has an owner who can refuse (admission), not where a full pipe
    # would make the worker wait or lose a message.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects under its identity replaces the old pipe
    return socket


def monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket on which these events of `socket` come in, as `zmq.utils.monitor.parse_monitor_message` reads them."""
    return socket.get_monitor_socket(events)


def send_routed(router: zmq.Socket[bytes], identity: bytes, message: bytes) -> bool:
    """Send to one peer of a ROUTER without blocking. False: it is gone, or too much waits for it already."""
    return try_send_routed(router, identity, message) is Sending.SENT


def try_send_routed(router: zmq.Socket[bytes], identity: bytes, message: bytes) -> Sending:
    """Send to one peer of a ROUTER without blocking."""
    try:
        router.send(identity, _SNDMORE_NOBLOCK)
        router.send(message, _NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return Sending.GONE
        if error.errno == zmq.EAGAIN:
            return Sending.FULL
        raise
    return Sending.SENT


def send_frames(socket: zmq.Socket[bytes], frames: Frames) -> None:
    """Send a header and its payload as one message; both are copied."""
    socket.send(frames[0], _SNDMORE)
    payload: Any = frames[1]  # pyzmq's stubs do not know that an array is a buffer
    socket.send(payload)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be received now."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


class SocketReader:
    """Feeds a socket's messages to a callback from an asyncio loop (zmq.asyncio costs ten times a plain receive).

    A ZeroMQ descriptor is edge-triggered: it says "something happened", once. So every wake-up drains the socket, and
    whoever *sends* on the same socket must call `poke()` afterwards, since a send may swallow the wake-up.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None],
        after_drain: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._on_message = on_message
        self._after_drain = after_drain
        self._is_poked = False
        self._is_closed = False
        self._fd = int(socket.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._wake)
        self.poke()  # messages may have come before the descriptor was watched

    def poke(self) -> None:
        """Drain soon, if anything is waiting."""
        if not self._is_poked:
            self._is_poked = True
            self._loop.call_soon(self._wake)

    def close(self) -> None:
        """Stop watching, a poke that is due included; the socket itself stays open."""
        self._is_closed = True
        self._loop.remove_reader(self._fd)

    def drain(self) -> None:
        """Hand on every message that is here now."""
        while self._drain_some() == _MAX_BURST:
            pass

    def _drain_some(self) -> int:
        """Hand on what is here, as far as it is no more than a burst; how many those were."""
        socket, on_message = self._socket, self._on_message
        for count in range(_MAX_BURST):
            if not has_message(socket):
                return count
            on_message(socket.recv_multipart(_NOBLOCK))
        return _MAX_BURST

    def _wake(self) -> None:
        self._is_poked = False
        if self._is_closed:
            return
        count = self._drain_some()
        if count and self._after_drain is not None:
            self._after_drain()
        if count == _MAX_BURST:
            self.poke()  # whoever sends faster than we take in must not keep us from everything else
