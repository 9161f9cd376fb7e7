"""`ClientLink`: the two sockets of a client, and a blocking wait on both. `Client` and `bench` are built on it.

Owns: identities, sockets, the poller, the wake-up descriptor. Never does: look into a message, or call back.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from typing import Final

import zmq

from procengine import ipc
from procengine.curve_keys import ClientKeys
from procengine.listen import reachable_from

__all__ = ["CUT_OFF_S", "ClientLink", "new_call_seed", "new_identity"]


CUT_OFF_S: Final = 30.0  # a frontend that was started again has answered by then


def new_call_seed() -> str:
    """What tells the tool calls of one request from those of all others, also of other clients and other days."""
    return secrets.token_hex(8)


def new_identity() -> bytes:
    """A routing id for both sockets of one client. ZeroMQ keeps those that begin with a zero byte for itself."""
    return b"c" + os.urandom(15)


class ClientLink:
    """One client's connection. One thread may receive; `queue` and `wake` may be called from any."""

    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        self._context = ipc.make_context()
        self._identity = new_identity()
        self._endpoint = endpoint
        self._keys = keys
        self._frontend = ipc.connect(self._context, zmq.DEALER, endpoint, identity=self._identity, keys=keys)
        self._disconnects = ipc.disconnects_of(self._frontend)
        self._output: zmq.Socket[bytes] | None = None
        self._outbox: deque[bytes] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._frontend, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._poller.register(self._disconnects, zmq.POLLIN)
        self._has_lost_frontend = False
        self._is_refused = False
        self._lost_at_s: float | None = None  # the connection was lost then, and no frontend has said anything since

    def attach(self, output_endpoint: str, frame: bytes) -> None:
        """Connect to the output process and introduce ourselves with `frame`."""
        endpoint = reachable_from(self._endpoint, output_endpoint)
        self._output = ipc.connect(self._context, zmq.DEALER, endpoint, identity=self._identity, keys=self._keys)
        self._output.send(frame)
        self._poller.register(self._output, zmq.POLLIN)

    def attach_again(self, frame: bytes) -> None:
        """Introduce ourselves once more."""
        assert self._output is not None
        self._output.send(frame)

    def queue(self, frame: bytes) -> None:
        """Have `frame` sent to the frontend by the next `receive` or `flush`."""
        self._outbox.append(frame)

    def wake(self) -> None:
        """Make a `receive` that waits in another thread return."""
        os.eventfd_write(self._wake, 1)

    def flush(self) -> None:
        """Send what is queued, without waiting: where ZeroMQ has given up, as it was not let in, nobody will read."""
        while self._outbox:
            frame = self._outbox.popleft()
            try:
                self._frontend.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self._is_refused = True

    def receive(self, timeout_ms: int) -> list[bytes]:
        """Send what is queued, then wait for frames and return all that are here; [] after `timeout_ms` or `wake`."""
        self.flush()
        frames: list[bytes] = []
        for source, _ in self._poller.poll(timeout_ms):
            if source == self._wake:
                os.eventfd_read(self._wake)
            elif source is self._disconnects:
                _drain(source, [])
                self._has_lost_frontend = True
                self._lost_at_s = time.monotonic()
            else:
                num_before = len(frames)
                _drain(source, frames)
                if source is self._frontend and len(frames) > num_before:
                    self._lost_at_s = None  # what outputs still come says nothing of it
        return frames

    @property
    def is_cut_off(self) -> bool:
        """Whether there is no hope of an answer, as far as sockets can tell: a group elsewhere leaves no other sign."""
        return self._is_refused or (self._lost_at_s is not None and time.monotonic() - self._lost_at_s > CUT_OFF_S)

    def take_disconnect(self) -> bool:
        """Whether the connection to the frontend was lost since this was asked last."""
        has_lost, self._has_lost_frontend = self._has_lost_frontend, False
        return has_lost

    def close(self, *, linger: bool = True) -> None:
        """Close the sockets. What was queued is still sent, unless it is known that nobody is there (`linger`)."""
        if self._context.closed:
            return
        if linger:
            self.flush()
        self._context.destroy(linger=None if linger else 0)
        os.close(self._wake)


def _drain(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    try:
        while True:
            frames.append(socket.recv(zmq.NOBLOCK))
    except zmq.Again:
        return
