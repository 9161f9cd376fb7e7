"""A strict little HTTP client for tests: whole answers, events as they come, and raw sockets."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

__all__ = ["Answer", "HttpClient", "strict_json"]

_TIMEOUT_S = 60.0
JSON = {"Content-Type": "application/json"}


def strict_json(data: bytes | str) -> Any:
    """RFC 8259: no NaN, no Infinity; UTF-8."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(data if isinstance(data, str) else data.decode(), parse_constant=refuse)


@dataclass(frozen=True)
class Answer:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return strict_json(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape; all its keys are there."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)
        return dict(error)


class HttpClient:
    """Asks one server; a connection a request."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self.url = url
        self.headers = headers or {}
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.address = (parts.hostname, parts.port)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """`body`: bytes as they are, anything else as JSON."""
        connection = http.client.HTTPConnection(*self.address, timeout=_TIMEOUT_S)
        try:
            self._send(connection, method, path, body, headers)
            return _read(connection)
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        return self.ask("POST", path, body, headers)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.ask("GET", path, None, headers)

    @contextmanager
    def opened(self, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        """A streamed answer; leaving the block hangs up."""
        connection = http.client.HTTPConnection(*self.address, timeout=_TIMEOUT_S)
        try:
            self._send(connection, "POST", path, body, None)
            yield connection.getresponse()
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a streamed answer; the last is `[DONE]`, and not in the list."""
        with self.opened(path, body | {"stream": True}) as response:
            text = response.read().decode()
            assert response.status == 200, text
        assert response.headers["Content-Type"].startswith("text/event-stream")
        *events, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return [strict_json(event.removeprefix("data: ")) for event in events]

    def raw(self) -> socket.socket:
        """A connected socket."""
        return socket.create_connection(self.address, timeout=_TIMEOUT_S)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str] | None,
    ) -> None:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = JSON if body is not None else {}
        connection.request(method, path, data, {**kind, **self.headers, **(headers or {})})


def _read(connection: http.client.HTTPConnection) -> Answer:
    response = connection.getresponse()
    return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, response.read())
