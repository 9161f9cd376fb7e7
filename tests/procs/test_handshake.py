"""Clients shake hands although the output process that was asked first died before it answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from procengine import ipc
from procengine.async_client import _Connection
from procengine.client_core import ClientCore
from procengine.client_handshake import connect_link
from procengine.groups import GroupInfo
from procengine.messages import PROTOCOL_VERSION, Attached, Welcome, encode


def answer_second_attach(folder: Path, connect: Callable[[GroupInfo], object]) -> None:
    """A group whose output process forgets the first Attach, and one client of it."""
    context = ipc.make_context()
    endpoint, outputs = f"ipc://{folder}/f", f"ipc://{folder}/o"
    frontend, output = ipc.bind(context, zmq.ROUTER, endpoint), ipc.bind(context, zmq.ROUTER, outputs)

    def serve() -> None:
        client, _ = frontend.recv_multipart()
        welcome = Welcome(PROTOCOL_VERSION, "g", "m", outputs, 100, 50, ("generate",), 1000)
        frontend.send_multipart([client, encode(welcome)])
        output.recv_multipart()
        client, _ = output.recv_multipart()
        output.send_multipart([client, encode(Attached(PROTOCOL_VERSION))])

    server = threading.Thread(target=serve)
    server.start()
    try:
        connect(GroupInfo(name="g", endpoint=endpoint))
        server.join(10)
        assert not server.is_alive()
    finally:
        context.destroy(linger=0)


def test_blocking_client(short_dir: Path) -> None:
    def connect(group: GroupInfo) -> None:
        link, welcome = connect_link(group, ClientCore())
        assert welcome.group == "g"
        link.close()

    answer_second_attach(short_dir, connect)


def test_async_client(short_dir: Path) -> None:
    async def shake_hands(group: GroupInfo) -> None:
        connection = _Connection(group, resubmits=True)
        await asyncio.wait_for(connection.shake_hands(), 10)
        assert connection.require_welcome().group == "g"
        connection.close()

    answer_second_attach(short_dir, lambda group: asyncio.run(shake_hands(group)))
