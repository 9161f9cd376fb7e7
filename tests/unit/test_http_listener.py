"""Listening sockets that are handed on."""

from __future__ import annotations

import socket

import pytest

from procengine.errors import ConfigError
from procengine.http_listener import listen, url_of


def test_a_free_port_is_taken_and_told() -> None:
    with listen("127.0.0.1", 0, "metrics_port") as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_taken_port_is_an_error_that_names_it() -> None:
    with listen("127.0.0.1", 0, "metrics_port") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^metrics_port: cannot listen on 127.0.0.1, port {port}: .*in use"):
            listen("127.0.0.1", port, "metrics_port")


def test_a_host_that_is_none_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"^metrics_port: cannot listen on 999\.0\.0\.1, port 0: "):
        listen("999.0.0.1", 0, "metrics_port")


def test_a_peer_that_went_without_a_word_is_noticed_by_its_connection() -> None:
    with listen("127.0.0.1", 0, "port") as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            silence_s = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            assert silence_s <= 60
