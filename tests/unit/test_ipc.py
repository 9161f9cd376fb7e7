"""Real sockets: nothing is lost, nothing hangs, a peer that is gone is noticed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from procengine import ipc

TIMEOUT_MS = 10_000


class Wire:
    """Sockets on endpoints in a directory with a short path (a socket's path ends at 107 bytes), closed together."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._context = ipc.make_context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def bind(self, kind: int, *, max_message_bytes: int = 1 << 30) -> zmq.Socket[bytes]:
        return self._keep(ipc.bind(self._context, kind, self.endpoint, max_message_bytes=max_message_bytes))

    def connect(self, kind: int, *, identity: bytes | None = None) -> zmq.Socket[bytes]:
        return self._keep(ipc.connect(self._context, kind, self.endpoint, identity=identity))

    @property
    def endpoint(self) -> str:
        return f"ipc://{self._directory / 'x'}"

    def disconnections(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """A socket with a message for each peer that goes."""
        return self._keep(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.destroy(linger=0)

    def _keep(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        self._sockets.append(socket)
        return socket


@pytest.fixture
def wire() -> Iterator[Wire]:
    with tempfile.TemporaryDirectory(prefix="pe", dir="/tmp") as path:
        made = Wire(path)
        yield made
        made.close()


def received(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(TIMEOUT_MS), "nothing came"
    return socket.recv_multipart()


def attached(router: zmq.Socket[bytes], dealer: zmq.Socket[bytes]) -> None:
    dealer.send(b"hello")
    received(router)


@pytest.mark.parametrize("sender_binds", [True, False])
def test_ipc_06_burst_beyond_the_default_mark_neither_blocks_nor_loses(wire: Wire, sender_binds: bool) -> None:
    if sender_binds:
        push = wire.bind(zmq.PUSH)
        pull = wire.connect(zmq.PULL)
        assert push.poll(TIMEOUT_MS, zmq.POLLOUT)
    else:
        push = wire.connect(zmq.PUSH)
        pull = wire.bind(zmq.PULL)
    for number in range(3000):
        push.send(b"%d" % number, zmq.NOBLOCK)
    assert [int(received(pull)[0]) for _ in range(3000)] == list(range(3000))


def test_ipc_06_router_holds_a_burst_for_a_client_that_does_not_read(wire: Wire) -> None:
    router = wire.bind(zmq.ROUTER)
    dealer = wire.connect(zmq.DEALER, identity=b"client")
    attached(router, dealer)
    assert all(ipc.send_routed(router, b"client", b"%d" % number) for number in range(3000))
    assert [int(received(dealer)[0]) for _ in range(3000)] == list(range(3000))


def test_routed_send_to_nobody_says_so(wire: Wire) -> None:
    router = wire.bind(zmq.ROUTER)
    assert ipc.send_routed(router, b"stranger", b"x") is False
    dealer = wire.connect(zmq.DEALER, identity=b"client")
    attached(router, dealer)
    assert ipc.send_routed(router, b"client", b"x") is True
    assert ipc.send_routed(router, b"stranger", b"x") is False
    assert received(dealer) == [b"x"]


def test_routed_send_to_a_client_that_went_says_so(wire: Wire) -> None:
    router = wire.bind(zmq.ROUTER)
    dealer = wire.connect(zmq.DEALER, identity=b"client")
    monitor = wire.disconnections(router)
    attached(router, dealer)
    dealer.close(linger=0)
    assert monitor.poll(TIMEOUT_MS), "the kernel reports a closed socket"
    # Its I/O thread knows; the socket itself hears of it when it next looks, which polling makes it do.
    assert any(not ipc.send_routed(router, b"client", b"x") or router.poll(10) for _ in range(500))


def test_client_that_comes_back_under_its_name_takes_its_place(wire: Wire) -> None:
    router = wire.bind(zmq.ROUTER)
    old = wire.connect(zmq.DEALER, identity=b"client")
    attached(router, old)
    old.close(linger=0)
    new = wire.connect(zmq.DEALER, identity=b"client")
    attached(router, new)
    assert ipc.send_routed(router, b"client", b"x") is True
    assert received(new) == [b"x"]


def test_oversize_message_costs_its_sender_the_connection_and_nobody_else(wire: Wire) -> None:
    router = wire.bind(zmq.ROUTER, max_message_bytes=1000)
    good = wire.connect(zmq.DEALER, identity=b"good")
    bad = wire.connect(zmq.DEALER, identity=b"bad")
    monitor = wire.disconnections(router)
    good.send(b"x" * 1000)
    assert received(router) == [b"good", b"x" * 1000]
    bad.send(b"x" * 1001)
    assert monitor.poll(TIMEOUT_MS), "the connection is dropped"
    good.send(b"still here")
    assert received(router) == [b"good", b"still here"]


def test_header_and_payload_come_as_one_message_and_are_copied(wire: Wire) -> None:
    pull = wire.bind(zmq.PULL)
    push = wire.connect(zmq.PUSH)
    payload = np.arange(5, dtype=np.int32)
    for _ in range(3):
        ipc.send_frames(push, (b"header", payload))
        payload += 1
    for start in range(3):
        header, data = received(pull)
        assert header == b"header"
        assert np.frombuffer(data, np.int32).tolist() == list(range(start, start + 5))


def test_part_of_a_buffer_can_be_sent(wire: Wire) -> None:
    pull = wire.bind(zmq.PULL)
    push = wire.connect(zmq.PUSH)
    for size in (0, 3):
        ipc.send_frames(push, (b"h", np.arange(9, dtype=np.int32)[:size]))
        assert np.frombuffer(received(pull)[1], np.int32).tolist() == list(range(size))


@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.PULL, zmq.DEALER, zmq.ROUTER])
def test_every_socket_gets_every_option(wire: Wire, kind: int) -> None:
    for socket in (wire.bind(kind, max_message_bytes=5000), wire.connect(kind)):
        assert socket.getsockopt(zmq.LINGER) == 1000, "not for ever"
        assert socket.getsockopt(zmq.SNDHWM) == socket.getsockopt(zmq.RCVHWM) == 0, "unbounded"
        assert socket.getsockopt(zmq.HANDSHAKE_IVL) == 10_000
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0, "no wake-ups of idle processes"
        assert socket.getsockopt(zmq.MAXMSGSIZE) in (5000, 1 << 30)


def test_has_message_tells_without_waiting(wire: Wire) -> None:
    pull = wire.bind(zmq.PULL)
    push = wire.connect(zmq.PUSH)
    assert ipc.has_message(pull) is False
    push.send(b"x")
    assert pull.poll(TIMEOUT_MS)
    assert ipc.has_message(pull) is True
    pull.recv()
    assert ipc.has_message(pull) is False


# --- SocketReader


def run_loop(main: Callable[[asyncio.AbstractEventLoop, asyncio.Future[None]], None]) -> None:
    """Runs until the future is done."""
    loop = asyncio.new_event_loop()
    try:
        done = loop.create_future()
        main(loop, done)
        loop.run_until_complete(asyncio.wait_for(done, TIMEOUT_MS / 1000))
    finally:
        loop.close()


def test_reader_finds_what_came_before_it_and_drains_bursts_in_order(wire: Wire) -> None:
    pull = wire.bind(zmq.PULL)
    push = wire.connect(zmq.PUSH)
    for number in range(10):
        push.send(b"%d" % number)
    assert pull.poll(TIMEOUT_MS)
    seen: list[int] = []
    drained: list[int] = []

    def main(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        def on_message(frames: list[bytes]) -> None:
            seen.append(int(frames[0]))
            if len(seen) == 10:  # the second burst comes while the first is being read
                for number in range(10, 3000):
                    push.send(b"%d" % number)

        def after_drain() -> None:
            drained.append(len(seen))
            if len(seen) == 3000 and not done.done():
                done.set_result(None)

        ipc.SocketReader(loop, pull, on_message, after_drain)

    run_loop(main)
    assert seen == list(range(3000))
    assert drained == sorted(set(drained)), "after_drain runs only when something came, and once for all of it"


def test_reader_that_is_poked_after_each_send_misses_nothing(wire: Wire) -> None:
    router = wire.bind(zmq.ROUTER)
    dealer = wire.connect(zmq.DEALER, identity=b"client")
    answers: list[int] = []

    def main(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        def on_request(frames: list[bytes]) -> None:
            assert ipc.send_routed(router, frames[0], frames[1])
            server.poke()

        def on_answer(frames: list[bytes]) -> None:
            answers.append(int(frames[0]))
            if len(answers) == 500:
                done.set_result(None)
                return
            dealer.send(b"%d" % len(answers))
            client.poke()

        server = ipc.SocketReader(loop, router, on_request)
        client = ipc.SocketReader(loop, dealer, on_answer)
        dealer.send(b"0")
        client.poke()

    run_loop(main)
    assert answers == list(range(500))


def test_closed_reader_leaves_messages_in_the_socket(wire: Wire) -> None:
    pull = wire.bind(zmq.PULL)
    push = wire.connect(zmq.PUSH)
    push.send(b"x")
    assert pull.poll(TIMEOUT_MS)
    seen: list[list[bytes]] = []

    def main(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        reader = ipc.SocketReader(loop, pull, seen.append)  # has poked itself
        reader.close()
        loop.call_soon(done.set_result, None)

    run_loop(main)
    assert seen == []
    assert received(pull) == [b"x"]
