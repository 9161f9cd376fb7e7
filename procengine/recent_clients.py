"""`RecentClients`: whom the frontend would tell that the group is going.

Owns: a bounded set, the least recent out first. Nobody says goodbye, and a client that leaves with nothing running is
missed by nobody: without a bound, a group that serves for months would remember all it ever had. Who is forgotten finds
out by itself: the group's lock is free. Never does: send.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["RecentClients"]


class RecentClients:
    """Routing ids of at most `limit` clients."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._clients: dict[bytes, None] = {}

    def add(self, client: bytes) -> None:
        """It has just been heard of."""
        self._clients.pop(client, None)
        self._clients[client] = None
        if len(self._clients) > self._limit:
            del self._clients[next(iter(self._clients))]

    def discard(self, client: bytes) -> None:
        """It is gone."""
        self._clients.pop(client, None)

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client: bytes) -> bool:
        return client in self._clients

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._clients)
