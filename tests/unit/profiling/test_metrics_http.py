"""Pages over HTTP."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from procengine.http_listener import listen
from procengine.profiling.metrics_http import Page, serve_pages


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with listen("127.0.0.1", 0, "metrics_port") as listener:
        count = iter(range(100))
        pages = {"/metrics": lambda: Page(HTTPStatus.OK, "text/plain; charset=utf-8", f"é {next(count)}\n")}
        server = serve_pages(socket.dup(listener.fileno()), pages)
        yield listener.getsockname()[1]
        server.shutdown()
        server.server_close()


def ask(connection: http.client.HTTPConnection, path: str, method: str = "GET") -> tuple[int, str]:
    connection.request(method, path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_pages_are_made_anew_and_a_connection_serves_several(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    assert ask(connection, "/metrics") == (200, "é 0\n")
    assert ask(connection, "/metrics?x=1") == (200, "é 1\n")
    status, body = ask(connection, "/metrics", "HEAD")
    assert (status, body) == (200, "")
    assert ask(connection, "/") == (404, "there are /metrics, /health and /top\n")
    connection.close()


def test_other_methods_and_garbage_are_refused(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    assert ask(connection, "/metrics", "POST")[0] == 501
    connection.close()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        raw.sendall(b"\x00\x01garbage\r\n\r\n")
        assert b"400" in raw.recv(1000)
