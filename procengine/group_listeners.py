"""`GroupListeners`: what the processes of a group that serve HTTP accept on.

Owns: the sockets, from before any process is started to the end of the group. Never does: accept.
"""

from __future__ import annotations

import socket

from procengine.config import EngineConfig
from procengine.http_listener import close_listener, listen, listen_unix, url_of

__all__ = ["GroupListeners"]


class GroupListeners:
    """One socket a role, at most.

    Attributes:
        urls: for the ready line, by what is served.

    Raises:
        ConfigError: an address cannot be had; names the option.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.urls: dict[str, str] = {}
        self._by_role: dict[str, socket.socket] = {}
        metrics, api = config.metrics, config.api
        if metrics.port is not None:
            listener = self._by_role["metrics"] = listen(metrics.host, metrics.port, "metrics_port")
            self.urls["metrics"] = f"{url_of(listener)}/metrics"
        elif metrics.uds is not None:
            self._by_role["metrics"] = listen_unix(metrics.uds, "metrics")
        if api.port is not None:
            listener = self._by_role["api"] = listen(api.host, api.port, "port")
            scheme = "http" if api.ssl_certfile is None else "https"
            self.urls["http"] = url_of(listener).replace("http", scheme, 1)
        elif api.uds is not None:
            self._by_role["api"] = listen_unix(api.uds, "uds")
            self.urls["http"] = f"unix:{api.uds}"

    @property
    def fds(self) -> dict[str, int]:
        """Descriptors by the role that serves them."""
        return {role: listener.fileno() for role, listener in self._by_role.items()}

    def close(self, role: str) -> None:
        """Nobody serves it any more: who asks shall hear so at once."""
        if role in self._by_role:
            close_listener(self._by_role[role])

    def close_all(self) -> None:
        """The end."""
        for role in self._by_role:
            self.close(role)
