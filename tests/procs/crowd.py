"""Many clients in one process: bare sockets by the hundred, for tests of what a crowd does to a group.

Run as a program it is a crowd of its own: `python -m tests.procs.crowd ENDPOINT COUNT MAX_TOKENS` says "ready" when
all requests are on their way, reads nothing, and goes when its stdin ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from procengine import ipc
from procengine.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Delta,
    Hello,
    Lost,
    Outputs,
    Received,
    Rejected,
    Stats,
    Submit,
    Welcome,
    decode_to_client,
    encode,
)
from procengine.open_files import raise_limit
from tests.procs.harness import NUM_SPECIAL
from tests.procs.raw_client import body

__all__ = ["Crowd", "Member"]


class Member:
    """One client of a crowd: what it heard."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, is_deaf: bool) -> None:
        self._context = context
        self._identity = b"m" + os.urandom(15)
        self._is_deaf = is_deaf
        self.frontend = self._connect(endpoint)
        self.output: zmq.Socket[bytes] | None = None
        self.rejections: list[Rejected] = []
        self.deltas: list[Delta] = []
        self.num_messages = 0
        self.num_ends = 0
        self.is_attached = False
        self.frontend.send(encode(Hello(PROTOCOL_VERSION)))

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1 if self._is_deaf else 0)  # 1: what is not read stays with the sender
        socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.connect(endpoint)
        return socket

    def receive(self) -> None:
        """Take in what is here."""
        for socket in filter(None, (self.frontend, self.output)):
            while ipc.has_message(socket):
                self._take(decode_to_client(socket.recv(zmq.NOBLOCK)))

    def _take(self, message: Welcome | Received | Rejected | Stats | Attached | Lost | Outputs) -> None:
        match message:
            case Welcome():
                self.output = self._connect(message.output_endpoint)
                self.output.send(encode(Attach(PROTOCOL_VERSION)))
            case Attached():
                self.is_attached = True
            case Rejected():
                self.rejections.append(message)
            case Stats() | Received() | Lost():
                pass
            case Outputs():
                self.num_messages += 1
                for item in message.items:
                    assert isinstance(item, Delta)
                    self.deltas.append(item)
                    self.num_ends += item.finish_reason is not None

    def submit(self, request_id: str, max_tokens: int, **params: Any) -> None:
        """A request with a prompt of three tokens."""
        ids = [NUM_SPECIAL + at for at in range(3)]
        self.frontend.send(
            encode(Submit(request_id, "generate", msgspec.Raw(encode(body(ids, max_tokens=max_tokens, **params)))))
        )

    @property
    def token_ids(self) -> list[int]:
        """All that came."""
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    def close(self) -> None:
        """Leave without a word."""
        for socket in filter(None, (self.frontend, self.output)):
            socket.close(linger=0)


class Crowd:
    """Clients that come one by one, and are all attached when this is made."""

    def __init__(self, endpoint: str, count: int, *, is_deaf: bool = False, timeout_s: float = 60.0) -> None:
        raise_limit(5 * count + 256)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * count + 64)
        self.members = [Member(self._context, endpoint, is_deaf=is_deaf) for _ in range(count)]
        try:
            self.receive_until(lambda member: member.is_attached, timeout_s)
        except BaseException:
            self.close()
            raise

    def receive_until(self, is_done: Callable[[Member], bool], timeout_s: float = 60.0) -> None:
        """Until it is true of all members; nothing is read for those of whom it is."""
        deadline_s, left = time.monotonic() + timeout_s, self.members
        while left:
            for member in left:
                member.receive()
            left = [member for member in left if not is_done(member)]
            assert time.monotonic() < deadline_s, f"{len(left)} of {len(self.members)} are not done in {timeout_s:g} s"
            if left:
                time.sleep(1e-3)

    def close(self) -> None:
        """All leave."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _main(endpoint: str, count: str, max_tokens: str) -> None:
    with Crowd(endpoint, int(count), is_deaf=True) as crowd:
        for member in crowd.members:
            member.submit("deaf", int(max_tokens))
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main(*sys.argv[1:4])
