"""`Backlog`: what clients are to get that cannot be sent to them now. Pure.

Owns: who does not read, or has not reconnected yet to a restarted output process; what waits for each of them, merged;
when to try again, and who has to be given up. Never does: send, or read a clock.

The worker and the other clients wait for none of them: here is the only place where anything waits, and it has bounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from procengine.merged_delta import MergedDelta, wire_bytes
from procengine.messages import Delta, Embedding
from procengine.postprocessor import Item

__all__ = ["Backlog", "Waiting"]

_FIRST_PAUSE_NS = 8_000_000
_MAX_PAUSE_NS = 512_000_000
_MAX_ABSENT_PAUSE_NS = 32_000_000  # one that reconnects shall not be kept waiting


@dataclass(slots=True)
class Waiting:
    """One client.

    Attributes:
        is_absent: it is not connected; else it does not read.
        farewell: what it must hear first: that it was dropped. It is sent at the next occasion, or never.
        deadline_ns: it is given up then; None is never.
    """

    is_absent: bool
    try_ns: int
    deadline_ns: int | None = None
    pause_ns: int = _FIRST_PAUSE_NS
    num_bytes: int = 0
    farewell: bytes | None = None
    deltas: dict[int, MergedDelta] = field(default_factory=dict)  # by key
    embeddings: dict[int, Embedding] = field(default_factory=dict)

    def add(self, items: Iterable[Item]) -> None:
        """More for it."""
        for item in items:
            if isinstance(item, Embedding):
                self.embeddings[item.key] = item
                self.num_bytes += wire_bytes(item)
            elif (merged := self.deltas.get(item.key)) is not None:
                self.num_bytes -= merged.num_bytes
                merged.add(item)
                self.num_bytes += merged.num_bytes
            else:
                self.deltas[item.key] = merged = MergedDelta(item)
                self.num_bytes += merged.num_bytes

    def take(self) -> list[Delta | Embedding]:
        """All that waits, in the order in which requests began to wait."""
        return [*(merged.take() for merged in self.deltas.values()), *self.embeddings.values()]

    def ended_keys(self) -> set[int]:
        """The requests whose ends wait."""
        return {key for key, merged in self.deltas.items() if merged.has_ended} | set(self.embeddings)


class Backlog:
    """All clients for which something waits.

    Args:
        max_client_bytes: that may wait for one of them.
        max_bytes: that may wait for all of them together.
    """

    def __init__(self, max_client_bytes: int, max_bytes: int) -> None:
        self.clients: dict[bytes, Waiting] = {}
        self.num_bytes = 0
        self._max_client_bytes = max_client_bytes
        self._max_bytes = max_bytes
        self._too_much: list[bytes] = []

    @property
    def has_items(self) -> bool:
        """Whether anything waits but farewells."""
        return any(waiting.num_bytes for waiting in self.clients.values())

    def add(self, client: bytes, items: list[Item]) -> bool:
        """More for a client; False: nothing waits for it, so it can be sent."""
        waiting = self.clients.get(client)
        if waiting is None:
            return False
        self._add(client, waiting, items)
        return True

    def hold(
        self, client: bytes, items: list[Item], now_ns: int, *, is_absent: bool, deadline_ns: int | None = None
    ) -> None:
        """These could not be sent to a client for which nothing waited."""
        waiting = self.clients[client] = Waiting(is_absent, now_ns + _FIRST_PAUSE_NS, deadline_ns)
        self._add(client, waiting, items)

    def _add(self, client: bytes, waiting: Waiting, items: list[Item]) -> None:
        before = waiting.num_bytes
        waiting.add(items)
        self.num_bytes += waiting.num_bytes - before
        if waiting.num_bytes > self._max_client_bytes:
            self._too_much.append(client)

    def bid_farewell(self, client: bytes, farewell: bytes, now_ns: int) -> None:
        """It has been dropped, and is to hear of that when it reads again."""
        self.clients[client] = Waiting(False, now_ns + _MAX_PAUSE_NS, None, _MAX_PAUSE_NS, farewell=farewell)

    def remove(self, client: bytes) -> Waiting | None:
        """Nothing waits for it any more: it was sent, or given up."""
        waiting = self.clients.pop(client, None)
        if waiting is not None:
            self.num_bytes -= waiting.num_bytes
        return waiting

    def take_slowest(self) -> tuple[bytes, Waiting] | None:
        """Take out a client for which too much waits, or the one with most when all together are too many."""
        while self._too_much:
            client = self._too_much.pop()
            if (waiting := self.remove(client)) is not None:
                return client, waiting
        if self.num_bytes <= self._max_bytes:
            return None
        client = max(self.clients, key=lambda client: self.clients[client].num_bytes)
        waiting = self.remove(client)
        assert waiting is not None
        return client, waiting

    # --- when to try again

    def due(self, now_ns: int) -> list[bytes]:
        """Whom to try now."""
        return [client for client, waiting in self.clients.items() if waiting.try_ns <= now_ns]

    def try_later(self, client: bytes, now_ns: int, *, is_absent: bool) -> None:
        """It could not be sent this time either."""
        waiting = self.clients[client]
        waiting.is_absent = is_absent
        waiting.pause_ns = min(2 * waiting.pause_ns, _MAX_ABSENT_PAUSE_NS if is_absent else _MAX_PAUSE_NS)
        waiting.try_ns = now_ns + waiting.pause_ns

    def next_ns(self) -> int | None:
        """When the next one is to be tried; None: nobody is."""
        return min((waiting.try_ns for waiting in self.clients.values()), default=None)

    def shorten(self, deadline_ns: int) -> None:
        """Wait for nobody longer than until then."""
        for waiting in self.clients.values():
            waiting.deadline_ns = min(waiting.deadline_ns or deadline_ns, deadline_ns)

    def take_late(self, now_ns: int) -> list[tuple[bytes, Waiting]]:
        """Take out those that did not come, or read, in time."""
        late = [client for client, waiting in self.clients.items() if (waiting.deadline_ns or now_ns + 1) <= now_ns]
        return [(client, waiting) for client in late if (waiting := self.remove(client)) is not None]

    def ended_keys(self) -> set[int]:
        """The requests whose ends wait."""
        return set().union(*(waiting.ended_keys() for waiting in self.clients.values()))
