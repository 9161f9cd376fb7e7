"""A stream whose connection is lost can be gone on with, for as long as was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Any

import pytest

from tests.api.http_client import JSON, HttpClient, strict_json
from tests.procs.canary import ask_status, expect_idle
from tests.procs.harness import Served, as_ids, wait_until

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    return serve_module("--port", 0, "--mock-step-ms", 10)


def body(**fields: Any) -> dict[str, Any]:
    return {
        "prompt": as_ids(7),
        "max_tokens": 100,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **fields,
    }


def asked(request_id: str, window_s: object = 30) -> dict[str, str]:
    return {"X-Request-Id": request_id, "X-Procengine-Resume-Window": str(window_s)}


def depth(group: Served) -> int:
    return sum(process.queue_depth for process in ask_status(group).processes if process.role == "frontend")


class Reader:
    """A connection that reads events until it is closed."""

    def __init__(self, client: HttpClient, method: str, path: str, body: Any, headers: dict[str, str]) -> None:
        self._connection = HTTPConnection(*client.address, timeout=60)
        client._send(self._connection, method, path, body, headers)
        self.response = self._connection.getresponse()

    def event(self) -> tuple[int, str]:
        lines = [self.response.readline().decode().strip() for _ in range(3)]
        assert lines[0].startswith("id: ") and lines[1].startswith("data: ") and not lines[2], lines
        return int(lines[0][4:]), lines[1][6:]

    def rest(self) -> list[tuple[int, str]]:
        found = re.findall(r"id: (\d+)\ndata: (.*)\n\n", self.text())
        return [(int(number), data) for number, data in found]

    def text(self) -> str:
        """All that is still to come."""
        try:
            return self.response.read().decode()
        finally:
            self.close()

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def start(client: HttpClient, request_id: str, window_s: object = 30, **fields: Any) -> Reader:
    return Reader(client, "POST", TEXT, body(**fields), JSON | asked(request_id, window_s))


def go_on(client: HttpClient, request_id: str, after: int | None, headers: dict[str, str] | None = None) -> Reader:
    last = {} if after is None else {"Last-Event-ID": str(after)}
    return Reader(client, "GET", f"/v1/streams/{request_id}", None, last | (headers or {}))


def num_tokens(events: list[tuple[int, str]]) -> int:
    return sum(
        len(choice["token_ids"]) for _, data in events if data != "[DONE]" for choice in strict_json(data)["choices"]
    )


def test_a_stream_that_was_dropped_twice_is_whole(group: Served, http: HttpClient) -> None:
    reader = start(http, "twice")
    assert reader.response.headers["X-Procengine-Resume-Window"] == "30"
    events = [reader.event() for _ in range(5)]
    reader.close()
    reader = go_on(http, "twice", events[-1][0])
    assert reader.response.headers["Content-Type"].startswith("text/event-stream")
    events += [reader.event() for _ in range(20)]
    reader.close()
    events = events[:-7]  # as if these had been lost with the connection
    events += go_on(http, "twice", events[-1][0]).rest()
    assert [number for number, _ in events] == list(range(1, len(events) + 1))
    assert num_tokens(events) == 100 and [data for _, data in events].count("[DONE]") == 1
    assert events[-1][1] == "[DONE]"
    # The end is told to who has not got it, and not to who has.
    assert go_on(http, "twice", events[-2][0]).rest() == events[-1:]
    again = go_on(http, "twice", events[-1][0])
    assert (again.response.status, again.response.headers["Content-Length"], again.text()) == (204, None, "")
    everything = go_on(http, "twice", None).rest()
    assert everything == events


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_api_that_streams_can_be_resumed(http: HttpClient, path: str) -> None:
    turn = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": turn, "max_tokens": 20},
        "/v1/responses": {"input": "hi", "max_output_tokens": 20},
        "/v1/messages": {"messages": turn, "max_tokens": 20, "model": None},
    }
    wanted = {name: value for name, value in bodies[path].items() if value is not None} | {"stream": True}
    if path == "/v1/messages":
        wanted["model"] = http.get("/v1/models").json["data"][0]["id"]
    reader = Reader(http, "POST", path, wanted, JSON | asked(path.replace("/", "-")))
    head = b"".join(reader.response.readline() for _ in range(2))
    reader.close()
    assert head.startswith(b"id: 1\n")
    whole = go_on(http, path.replace("/", "-"), 0).text()
    numbers = [int(found) for found in re.findall(r"^id: (\d+)$", whole, re.MULTILINE)]
    assert numbers == list(range(1, whole.count("\n\n") + 1))
    assert whole.startswith(head.decode())


def test_a_connection_lost_before_the_first_event_is_no_loss(group: Served, http: HttpClient) -> None:
    with http.raw() as connection:
        data = json.dumps(body(prompt=as_ids(2000), max_tokens=5)).encode()
        headers = "".join(f"{name}: {value}\r\n" for name, value in (JSON | asked("early")).items())
        connection.sendall(
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data
        )
        wait_until(lambda: http.ask("HEAD", "/v1/streams/early").status == 200, "it is known")
    events = go_on(http, "early", None).rest()
    assert num_tokens(events) == 5 and events[-1][1] == "[DONE]"


def test_when_the_window_is_over_the_request_is_aborted(group: Served, http: HttpClient) -> None:
    start(http, "left", 1, max_tokens=2000).close()
    assert depth(group) == 1
    expect_idle(group, 10.0)  # of 20 s
    assert http.get("/v1/streams/left").error["code"] == "stream_not_found"
    start(http, "left", 1, max_tokens=2).rest()  # and its id is free


def test_a_stream_has_one_reader_the_newest(group: Served, http: HttpClient) -> None:
    first = start(http, "both", max_tokens=300)
    number, _ = first.event()
    second = go_on(http, "both", number)
    with pytest.raises((HTTPException, OSError)):
        first.text()  # cut, and not ended in order
    assert second.event()[0] == number + 1
    second.close()
    assert http.ask("DELETE", "/v1/streams/both").status == 204
    expect_idle(group, 10.0)
    assert http.ask("DELETE", "/v1/streams/both").status == 404


def test_nobody_elses_stream_and_nothing_that_cannot_be(group: Served, http: HttpClient) -> None:
    reader = start(http, "mine", max_tokens=2000)
    reader.event()
    assert http.get("/v1/streams/mine", {"Authorization": "Bearer another"}).status == 404
    assert http.get("/v1/streams/").status == 404
    assert http.post(TEXT, body(), asked("mine")).error["code"] == "request_id_in_use"
    for last, status in (("x", 400), ("-1", 400), ("99999", 400), ("9" * 100, 400), ("²", 400)):
        assert http.get("/v1/streams/mine", {"Last-Event-ID": last.encode().decode("latin-1")}).status == status
    for window in ("0", "-1", "1.5", "601", "nan", "9" * 50, ""):
        assert http.post(TEXT, body(), asked("other", window)).error["param"] == "X-Procengine-Resume-Window"
    assert http.post(TEXT, body(stream=False), asked("other")).error["param"] == "X-Procengine-Resume-Window"
    assert http.post(TEXT, body(max_tokens=10**6), asked("other")).status == 400
    assert http.post(TEXT, body(max_tokens=10**6), asked("other")).error["param"] == "max_tokens"  # not "in use"
    reader.event()  # none of that took it away
    reader.close()
    http.ask("DELETE", "/v1/streams/mine")
    expect_idle(group, 10.0)


def test_without_the_header_nothing_is_kept(http: HttpClient) -> None:
    with http.opened(TEXT, body()) as response:
        assert "X-Procengine-Resume-Window" not in response.headers
        assert response.readline().startswith(b"data: ")
