"""A listening TCP socket that one process makes and another one serves.

Owns: how an address that cannot be had is reported. Never does: accept.

The supervisor makes it, so that a port that is taken is an error before anything is started, and so that the port stays
the same while the process that serves it is started again: connections wait meanwhile.
"""

from __future__ import annotations

import socket

from procengine.errors import ConfigError

__all__ = ["listen", "url_of"]


def listen(host: str, port: int, what: str) -> socket.socket:
    """A socket that listens on `host` (a name or an address of this machine) and `port`; 0 is any that is free.

    Raises:
        ConfigError: it cannot; names the option `what`.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(f"{what}: cannot listen on {host}, port {port}: {error.strerror or error}") from error


def url_of(listener: socket.socket) -> str:
    """`http://HOST:PORT` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
