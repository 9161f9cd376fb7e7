"""`ClientSender`: the output process's side towards clients: what each gets, now or when it can.

Wiring only: `Backlog` says what waits for whom and for how long. Up to 64 messages that a client has not read lie in
ZeroMQ's own queue, and what the kernel's buffer holds; whatever comes then waits in the backlog, merged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from procengine import ipc
from procengine.backlog import Backlog, Waiting
from procengine.child import Child
from procengine.errors import EngineDeadError, OverloadedError
from procengine.messages import (
    PROTOCOL_VERSION,
    UNREADABLE,
    Attached,
    Lost,
    Outputs,
    Rejected,
    decode_from_output_peer,
    encode,
)
from procengine.postprocessor import Item
from procengine.procs.client_sockets import ClientSockets
from procengine.profiling.records import RecordKind
from procengine.profiling.span_ring import SpanWriter
from procengine.stray_frames import StrayFrames

__all__ = ["ClientSender"]

_CLIENT_DROPPED = int(RecordKind.CLIENT_DROPPED)
_MAX_UNSENT = 64
_MAX_CLIENT_BYTES = 4096  # of what a client says here, which is who it is
_HOLD_NS = 10 * 10**9  # a client that has not come back to a new process by then is gone
_HOLD_AT_END_NS = 2 * 10**9
_PROBE_S = 0.25  # from a client's leaving until those who get nothing yet are asked whether they are there
_MAX_LOST = 256  # clients that were given up while they were away, and may come back
_LOST_DELAYS_S = (0.02, 0.3)  # from a new connection until its client can be reached, for certain


class ClientSender:
    """One for the process.

    Args:
        drop: ends all requests of a client, and hears which had ended without its hearing of it; returns how many.
        waiting_clients: those that have requests, and none that is getting tokens.
        after_retry: called when something that had waited is gone.
    """

    def __init__(
        self,
        child: Child,
        loop: asyncio.AbstractEventLoop,
        spans: SpanWriter,
        strays: StrayFrames,
        drop: Callable[[bytes, set[int]], int],
        waiting_clients: Callable[[], Iterable[bytes]],
        after_retry: Callable[[set[int]], None],
    ) -> None:
        limits = child.config.limits
        self._loop = loop
        self._spans = spans
        self._strays = strays
        self._drop = drop
        self._waiting_clients = waiting_clients
        self._after_retry = after_retry
        self._limits = limits
        self._is_successor = child.epoch > 0
        self._absent_until_ns = time.monotonic_ns() + _HOLD_NS if self._is_successor else 0
        self._backlog = Backlog(limits.max_client_bytes, limits.max_unsent_bytes)
        self._lost: dict[bytes, None] = {}
        self._num_dropped = 0
        self._retry: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._lost_calls = 0
        self._sockets = ClientSockets(
            child,
            loop,
            on_come=self._on_come,
            on_go=self._on_go,
            max_message_bytes=_MAX_CLIENT_BYTES,
            max_unsent=_MAX_UNSENT,
        )
        self._sockets.start(self._on_message)

    @property
    def has_unsent(self) -> bool:
        """Whether anybody is still waited for."""
        return self._backlog.has_items

    def held_keys(self) -> set[int]:
        """Requests whose ends have not been sent yet."""
        return self._backlog.ended_keys() if self._backlog.clients else set()

    def deliver(self, items_by_client: dict[bytes, list[Item]], sent_ns: int) -> None:
        """One message a client, of what is new for it, detokenized by then."""
        backlog = self._backlog
        for client, items in items_by_client.items():
            if backlog.clients and backlog.add(client, items):
                continue
            sending = self._sockets.try_send(client, encode(Outputs(items, sent_ns)))
            if sending is not ipc.Sending.SENT:
                self._hold_or_drop(client, items, is_absent=sending is ipc.Sending.GONE)
        if backlog.clients:
            self._drop_slowest()
            self._arm()
        self._sockets.poke()

    def say(self, client: bytes, message: Rejected | Lost) -> None:
        """A word that some may not hear: they are gone, or do not read."""
        self._sockets.try_send(client, encode(message))
        self._sockets.poke()

    def shorten(self) -> None:
        """The group is ending: nobody is waited for much longer."""
        deadline_ns = time.monotonic_ns() + _HOLD_AT_END_NS
        self._absent_until_ns = min(self._absent_until_ns, deadline_ns)
        self._backlog.shorten(deadline_ns)

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            decode_from_output_peer(frames[-1])
        except UNREADABLE as error:
            self._strays.drop("output", error, frames[0])  # whoever it is has no requests here
            return
        self._say_attached(frames[0])
        self._sockets.poke()

    def _say_attached(self, client: bytes) -> ipc.Sending:
        return self._sockets.try_send(client, encode(Attached(PROTOCOL_VERSION)))

    # --- clients that cannot be sent to

    def _hold_or_drop(self, client: bytes, items: list[Item], *, is_absent: bool) -> None:
        now_ns = time.monotonic_ns()
        if not is_absent:
            self._backlog.hold(client, items, now_ns, is_absent=False)
        elif now_ns < self._absent_until_ns:
            self._backlog.hold(client, items, now_ns, is_absent=True, deadline_ns=self._absent_until_ns)
        else:
            self._drop_absent(client)

    def _drop_absent(self, client: bytes, waiting: Waiting | None = None) -> None:
        if self._is_successor:
            self._lost[client] = None
            if len(self._lost) > _MAX_LOST:
                del self._lost[next(iter(self._lost))]
        self._drop_client(client, waiting, is_slow=False)

    def _drop_slowest(self) -> None:
        while (slowest := self._backlog.take_slowest()) is not None:
            client, waiting = slowest
            text = (
                f"this client left {waiting.num_bytes} bytes unread; its requests were aborted. The limit is "
                f"{self._limits.max_client_bytes} for one client (max_client_bytes), {self._limits.max_unsent_bytes} "
                "for all (max_unsent_bytes)"
            )
            farewell = encode(Rejected("", OverloadedError.code, text))
            self._drop_client(client, waiting, is_slow=True)
            self._backlog.bid_farewell(client, farewell, time.monotonic_ns())

    def _drop_client(self, client: bytes, waiting: Waiting | None, *, is_slow: bool) -> None:
        num_requests = self._drop(client, waiting.ended_keys() if waiting else set())
        num_bytes = waiting.num_bytes if waiting else 0
        now_ns = time.monotonic_ns()
        self._spans.record(_CLIENT_DROPPED, self._num_dropped, now_ns, int(is_slow), num_requests, num_bytes)
        self._num_dropped += 1

    def _arm(self) -> None:
        next_ns = self._backlog.next_ns() if self._retry is None else None
        if next_ns is not None:
            self._retry = self._loop.call_later(max(next_ns - time.monotonic_ns(), 0) / 1e9 + 1e-3, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        now_ns, held_keys = time.monotonic_ns(), self._backlog.ended_keys()
        for client in self._backlog.due(now_ns):
            self._try_client(client, now_ns)
        for client, waiting in self._backlog.take_late(now_ns):
            self._drop_absent(client, waiting)
        self._arm()
        self._sockets.poke()
        self._after_retry(held_keys - self._backlog.ended_keys())

    def _try_client(self, client: bytes, now_ns: int) -> None:
        waiting = self._backlog.clients[client]
        sending = self._send_waiting(client, waiting, now_ns)
        if sending is ipc.Sending.SENT:
            self._backlog.remove(client)
        elif sending is ipc.Sending.GONE and now_ns >= self._absent_until_ns:
            self._backlog.remove(client)
            self._drop_absent(client, waiting)
        else:
            self._backlog.try_later(client, now_ns, is_absent=sending is ipc.Sending.GONE)

    def _send_waiting(self, client: bytes, waiting: Waiting, now_ns: int) -> ipc.Sending:
        if waiting.farewell is not None:
            sending = self._sockets.try_send(client, waiting.farewell)
            if sending is not ipc.Sending.SENT:
                return sending
            waiting.farewell = None
        if not waiting.num_bytes:
            return ipc.Sending.SENT
        return self._sockets.try_send(client, encode(Outputs(waiting.take(), now_ns)))

    # --- clients that come and go

    def _on_go(self) -> None:
        if self._probe is None:
            self._probe = self._loop.call_later(_PROBE_S, self._probe_waiting)

    def _probe_waiting(self) -> None:
        """Whoever gets tokens is noticed when it is gone; of the others, ask. The answer is in the sending."""
        self._probe = None
        if time.monotonic_ns() < self._absent_until_ns:
            return  # they may come back, and somebody is looking
        for client in set(self._waiting_clients()) - self._backlog.clients.keys():
            if self._say_attached(client) is ipc.Sending.GONE:
                self._drop_absent(client)
        self._sockets.poke()

    def _on_come(self) -> None:
        """It may be one whose requests were aborted while it was away."""
        if self._lost and not self._lost_calls:
            self._lost_calls = len(_LOST_DELAYS_S)
            for delay_s in _LOST_DELAYS_S:
                self._loop.call_later(delay_s, self._tell_lost)

    def _tell_lost(self) -> None:
        self._lost_calls -= 1
        text = (
            f"the output process was restarted, and this client was not there for {_HOLD_NS // 10**9} s: its requests "
            "were aborted"
        )
        message = encode(Rejected("", EngineDeadError.code, text))
        for client in list(self._lost):
            if self._sockets.try_send(client, message) is not ipc.Sending.GONE:
                del self._lost[client]
        self._sockets.poke()
