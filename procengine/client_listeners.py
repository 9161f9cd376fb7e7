"""`ClientListeners`: the tcp sockets that a supervisor holds for the clients of its group.

Owns: the sockets, so that a port that is taken is an error before anything is started, and so that clients that come
while a process is started again wait instead of being refused. Never does: accept.
"""

from __future__ import annotations

import socket

import msgspec

from procengine.config import EngineConfig
from procengine.errors import ConfigError
from procengine.http_listener import listen
from procengine.listen import host_port, with_ports

__all__ = ["ClientListeners"]


class ClientListeners:
    """One for the frontend and one for the output process, or none. Raises ConfigError: a port cannot be had."""

    def __init__(self, config: EngineConfig) -> None:
        self._sockets: dict[str, socket.socket] = {}
        self.endpoint = ""  # where tcp clients connect; "" for a group without
        self.config = config  # with the ports that were taken
        if config.listen is None:
            return
        try:
            for role, endpoint in (("frontend", config.listen.frontend), ("output", config.listen.output)):
                self._sockets[role] = listen(*host_port(endpoint), "listen")
                self._sockets[role].setblocking(False)
        except ConfigError:
            self.close()
            raise
        frontend, output = (listener.getsockname()[1] for listener in self._sockets.values())
        listening = with_ports(config.listen, frontend, output)
        self.config = msgspec.structs.replace(config, listen=listening)
        self.endpoint = listening.frontend

    @property
    def fds(self) -> dict[str, int]:
        """Descriptors by the role that serves them."""
        return {role: listener.fileno() for role, listener in self._sockets.items()}

    def close(self) -> None:
        """From here on connections are refused, unless a process still has the socket."""
        for listener in self._sockets.values():
            listener.close()
