"""Many connections at once, and more than the process may have."""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import socket
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.api.http_client import HttpClient
from tests.procs.harness import Served, as_ids, is_running

END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def stream_all(client: HttpClient, number: int, num_tokens: int) -> tuple[int, int]:
    """So many streams at the same time: how many came to their end, and how many were refused with 503."""
    body = json.dumps({"prompt": as_ids(5), "max_tokens": num_tokens, "stream": True, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    tails: dict[socket.socket, bytes] = {}
    heads: dict[socket.socket, bytes] = {}
    by_fd: dict[int, socket.socket] = {}
    num_done = num_refused = 0
    with selectors.DefaultSelector() as selector:
        for _ in range(number):
            connection = client.raw()
            selector.register(connection, selectors.EVENT_READ)
            by_fd[connection.fileno()] = connection
            tails[connection] = heads[connection] = b""
        for connection in list(tails):
            with contextlib.suppress(OSError):  # refused and closed already; what it was told is still to be read
                connection.sendall(head % len(body) + body)
        while tails:
            ready = selector.select(60)
            assert ready, f"{len(tails)} streams stand still"
            for key, _ in ready:
                connection = by_fd[key.fd]
                try:
                    data = connection.recv(1 << 16)
                except OSError:
                    data = b""
                heads[connection] = (heads[connection] + data)[:64]
                tails[connection] = (tails[connection] + data)[-len(END) :]
                if tails[connection] == END or not data:
                    num_done += tails[connection] == END
                    num_refused += not data and heads[connection].startswith(b"HTTP/1.1 503")
                    selector.unregister(connection)
                    connection.close()
                    del tails[connection]
    return num_done, num_refused


@pytest.mark.slow
def test_a_thousand_streams_at_once(serve: Callable[..., Served]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"a process may have {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        group = serve("--port", 0, "--max-num-seqs", 1024)
        assert stream_all(HttpClient(group.ready["http"]), 1000, 20) == (1000, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_requests_that_never_end_are_cut_and_keep_nobody_out(serve: Callable[..., Served]) -> None:
    client = HttpClient(serve("--port", 0).ready["http"])
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(client.raw()) for _ in range(200)]
        for at, connection in enumerate(slow):  # some in the head, some in the body
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n" + b"\r\n" * (at % 2)
            )
        with selectors.DefaultSelector() as selector:
            for connection in slow:
                selector.register(connection, selectors.EVENT_READ)
            started_s, num_cut = time.monotonic(), 0
            while num_cut < len(slow):
                assert time.monotonic() - started_s < 90, f"{len(slow) - num_cut} are still there"
                for key, _ in selector.select(1.0):
                    selector.unregister(key.fileobj)
                    num_cut += 1
                for connection in slow[: 10 * (num_cut == 0)]:
                    connection.sendall(b"a")  # a byte now and then buys no time
                if num_cut == 0:
                    assert client.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200
        assert time.monotonic() - started_s > 30  # an honest client on a bad line has its time


@pytest.mark.slow
def test_too_few_descriptors_are_errors_and_no_death(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0)
    api = group.pids["api-0"]
    # As `ulimit -n 256` would have it, for this process alone; it has taken its own limit from the larger one.
    subprocess.run(["prlimit", f"--pid={api}", "--nofile=256:256"], check=True)
    client = HttpClient(group.ready["http"])
    num_done, _ = stream_all(client, 400, 5)
    assert num_done > 100  # the others are cut, or wait in the kernel until there is room
    assert is_running(api) and group.process.poll() is None
    assert client.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200
    assert "Traceback" not in group.log
