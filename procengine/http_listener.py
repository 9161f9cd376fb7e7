"""A listening socket, TCP or Unix, that one process makes and others serve.

Owns: how an address that cannot be had is reported. Never does: accept.

The supervisor makes it, so that a port that is taken is an error before anything is started, and so that the port stays
the same while the process that serves it is started again: connections wait meanwhile.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from procengine.errors import ConfigError

__all__ = ["close_listener", "listen", "listen_unix", "url_of"]

_KEEPALIVE: Final = (  # such a peer is known to be gone after a minute
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_BACKLOG: Final = 4096  # the kernel takes its own limit (net.core.somaxconn) if that is less


def listen(host: str, port: int, what: str) -> socket.socket:
    """A socket that listens on `host` (a name or an address of this machine) and `port`; 0 is any that is free.

    Raises:
        ConfigError: it cannot; names the option `what`.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"{what}: cannot listen on {host}, port {port}: {error.strerror or error}") from error
    # A peer whose machine or network has gone says nothing. Connections inherit this from their listener.
    for level, option, value in _KEEPALIVE:
        listener.setsockopt(level, option, value)
    return listener


def url_of(listener: socket.socket) -> str:
    """`http://HOST:PORT` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen_unix(path: str, what: str) -> socket.socket:
    """A Unix socket that listens at `path`. What a process that ended has left there is replaced.

    Raises:
        ConfigError: it cannot, or somebody listens there; names the option `what`.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError(f"{what}: somebody listens on {path} already")
            Path(path).unlink()
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{what}: cannot listen on {path}: {error.strerror or error}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def close_listener(listener: socket.socket) -> None:
    """Close it; the path of a Unix socket goes with it."""
    if listener.fileno() < 0:
        return
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    listener.close()
    if path:
        Path(path).unlink(missing_ok=True)
