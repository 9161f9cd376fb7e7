"""`HeldItems`: what clients are to get that have not reconnected yet to a restarted output process. Pure.

Owns: who is waited for, and until when. Never does: send, or read a clock.
"""

from __future__ import annotations

from procengine.postprocessor import Item

__all__ = ["HeldItems"]


class HeldItems:
    """Clients of a dead output process reconnect by themselves: until `deadline_s`, one that is not there may come.

    Attributes:
        clients: what each of them will get.
    """

    def __init__(self, deadline_s: float) -> None:
        self.clients: dict[bytes, list[Item]] = {}
        self._deadline_s = deadline_s

    def add(self, client: bytes, items: list[Item]) -> bool:
        """More for a client; False: it is not one that is waited for."""
        held = self.clients.get(client)
        if held is None:
            return False
        held += items
        return True

    def hold(self, client: bytes, items: list[Item], now_s: float) -> bool:
        """A client cannot be reached; False: it is gone."""
        if now_s >= self._deadline_s:
            return False
        self.clients[client] = items
        return True

    def ended_keys(self) -> set[int]:
        """The requests whose ends are held."""
        if not self.clients:
            return set()
        return {item.key for items in self.clients.values() for item in items if item.finish_reason is not None}

    def shorten(self, deadline_s: float) -> None:
        """Wait no longer than until then."""
        self._deadline_s = min(self._deadline_s, deadline_s)

    def take_late(self, now_s: float) -> list[bytes]:
        """The clients that have not come in time: they are not waited for any more."""
        if now_s < self._deadline_s:
            return []
        late, self.clients = list(self.clients), {}
        return late
