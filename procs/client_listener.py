"""`ClientListener`: a socket that clients connect to: who comes, who goes, and a shut door while too many are there.

Wiring only. It counts connections, not clients: whose they are, ZeroMQ does not say.

libzmq (4.3.5) ends its process when it cannot accept for want of a descriptor. So the door is shut before that: clients
that come then try again by themselves, every 100 ms, and find it open when others have left. `unbind` would not do: it
ends all connections that the listening socket has accepted. The socket's file gets another name meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import resource
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from procengine import ipc
from procengine.open_files import backlog_within, connections_within, files_for, raise_limit

__all__ = ["ClientListener"]

_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_HANDSHAKEN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)


class ClientListener:
    """A ROUTER. `on_come` and `on_go` are told of each connection made and lost. Only a Unix socket, whose `path` is
    known, has a door that can be shut.

    Attributes:
        socket: the ROUTER; `ipc.SocketReader` and sending are its owner's business.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        max_clients: int,
        *,
        path: Path | None = None,
        on_come: Callable[[], None] | None = None,
        on_go: Callable[[], None] | None = None,
    ) -> None:
        self.socket = socket
        self._path = path
        self._on_come = on_come
        self._on_go = on_go
        self._max_connections = connections_within(max_clients)
        self._fds: set[int] = set()
        self._is_open = True
        events = ipc.monitor(socket, _ACCEPTED | _DISCONNECTED | _HANDSHAKEN)
        self._reader = ipc.SocketReader(loop, events, self._on_event)

    @classmethod
    def bind(
        cls,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        max_clients: int,
        *,
        on_come: Callable[[], None] | None = None,
        on_go: Callable[[], None] | None = None,
        **options: int,
    ) -> ClientListener:
        """On a Unix socket, made here; the rest is for `ipc.bind`. So many clients may open as many files."""
        num_files = raise_limit(files_for(max_clients))
        socket = ipc.bind(context, zmq.ROUTER, endpoint, backlog=backlog_within(num_files), **options)
        path = Path(endpoint.removeprefix("ipc://"))
        return cls(loop, socket, max_clients, path=path, on_come=on_come, on_go=on_go)

    @property
    def num_connections(self) -> int:
        """How many there are."""
        return len(self._fds)

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        kind, fd = int(event["event"]), int(event["value"])
        if kind == _ACCEPTED:
            self._fds.add(fd)
            self._shut_if_full()
        elif kind == _DISCONNECTED:
            self._fds.discard(fd)
            self._open_again()
            if self._on_go is not None:
                self._on_go()
        elif kind == _HANDSHAKEN and self._on_come is not None:
            self._on_come()

    def _shut_if_full(self) -> None:
        if self._path is None or len(self._fds) < self._max_connections or not self._is_open:
            return
        self._fds = set(filter(_is_socket, self._fds))  # one that made room for its successor was closed without a word
        if len(self._fds) < self._max_connections:
            return
        self._is_open = False
        self._path.rename(_shut(self._path))
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text = f"{len(self._fds)} connections: no more are taken, as only {num_files} files may be open (ulimit -n)"
        print(f"procengine: {self._path}: {text}", file=sys.stderr, flush=True)

    def _open_again(self) -> None:
        if self._path is not None and not self._is_open and len(self._fds) < 0.9 * self._max_connections:
            self._is_open = True
            _shut(self._path).rename(self._path)


def _shut(path: Path) -> Path:
    return path.with_suffix(".shut")


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
