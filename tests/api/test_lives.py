"""Clients that leave, processes that die, groups that end: everybody hears of it, and nothing goes on for nobody."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.http_client import Answer, HttpClient, strict_json
from tests.procs.canary import ask_status, expect_idle
from tests.procs.harness import Served, as_ids, cpu_seconds, wait_until

TEXT = "/v1/completions"


def long(**fields: Any) -> dict[str, Any]:
    return {"prompt": as_ids(7), "max_tokens": 2000, "ignore_eos": True, **fields}


def send_and_leave(client: HttpClient, body: bytes, *, reads: int = 0, half: bool = False) -> socket.socket:
    """Ask, read so many bytes of the answer, and hang up (or only half)."""
    connection = client.raw()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % len(body) + body)
    if reads:
        assert connection.recv(reads)
    if half:
        connection.shutdown(socket.SHUT_WR)
    return connection


def depth(group: Served) -> int:
    return sum(process.queue_depth for process in ask_status(group).processes if process.role == "frontend")


def num_requests(body: dict[str, Any]) -> int:
    return len(body["prompt"]) if isinstance(body["prompt"][0], list) else 1


def num_steps(client: HttpClient) -> int:
    """Steps that were sent to the worker since the group's start."""
    lines = client.get("/metrics").body.decode().splitlines()
    return int(float(next(line.split()[-1] for line in lines if "iteration_tokens_total_count{" in line)))


@pytest.mark.parametrize("half", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("options", "bodies"),
    [
        pytest.param(("--mock-step-ms", 20), [long()], marks=pytest.mark.slow),
        pytest.param(("--mock-step-ms", 20), [long(stream=True)]),
        pytest.param(
            ("--mock-step-ms", 20), [long(prompt=[as_ids(3, at) for at in range(5)], n=3)], marks=pytest.mark.slow
        ),
        pytest.param(
            ("--mock-step-ms", 400, "--max-num-batched-tokens", 16, "--max-num-seqs", 16),
            [long(prompt=as_ids(1900), max_tokens=100), long(prompt=as_ids(1900, 1), max_tokens=100, stream=True)],
        ),
        pytest.param(("--mock-step-ms", 20, "--max-num-seqs", 1), [long(), long(), long(stream=True)]),
    ],
    ids=["whole", "stream", "many", "prefill", "queued"],
)
def test_api_05_who_leaves_is_not_worked_for(
    serve: Callable[..., Served], options: tuple[object, ...], bodies: list[dict[str, Any]], half: bool
) -> None:
    group = serve("--port", 0, *options)
    client = HttpClient(group.ready["http"])
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(send_and_leave(client, json.dumps(body).encode(), reads=10 * bool(body.get("stream"))))
            for body in bodies[:1]
        ]
        connections += [stack.enter_context(send_and_leave(client, json.dumps(body).encode())) for body in bodies[1:]]
        wait_until(lambda: depth(group) >= sum(map(num_requests, bodies)), "the group works")
        num_before = num_steps(client)
        for connection in connections:
            connection.shutdown(socket.SHUT_WR) if half else connection.close()
        expect_idle(group, 10.0)  # of 2000 steps that would take 40 s
    if 400 in options:  # a step that is planned already may still run, and the one at the device does
        assert num_steps(client) - num_before <= 4
    assert client.post(TEXT, {"prompt": "a", "max_tokens": 2}).status == 200


@pytest.mark.slow
def test_normal_ends_send_no_abort(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0)
    client = HttpClient(group.ready["http"])
    for stream in (False, True):
        client.ask("POST", TEXT, long(max_tokens=3, stream=stream))
    page = client.get("/metrics").body.decode()
    counts = {line.split()[0]: float(line.split()[1]) for line in page.splitlines() if "request_success_total{" in line}
    assert sum(counts.values()) == 2 and not any(value for name, value in counts.items() if "abort" in name)


@pytest.mark.slow
def test_a_worker_that_dies_is_a_pause(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0, "--mock-step-ms", 5)
    client = HttpClient(group.ready["http"])
    with client.opened(TEXT, long(max_tokens=200, stream=True, return_token_ids=True)) as response:
        head = response.readline()
        os.kill(group.pids["worker-0"], signal.SIGKILL)
        events = (head + response.read()).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    counts = [len(strict_json(event.removeprefix("data: "))["choices"][0]["token_ids"]) for event in events[:-2]]
    assert sum(counts) == 200


@pytest.mark.slow
def test_an_output_process_that_dies_is_a_pause(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0, "--mock-step-ms", 5)
    client = HttpClient(group.ready["http"])
    with client.opened(TEXT, long(max_tokens=200, stream=True, return_token_ids=True)) as response:
        head = response.readline()
        os.kill(group.pids["output"], signal.SIGKILL)
        events = (head + response.read()).decode().split("\n\n")
    counts = [len(strict_json(event.removeprefix("data: "))["choices"][0]["token_ids"]) for event in events[:-2]]
    assert sum(counts) == 200


@pytest.mark.slow
def test_ipc_01_the_end_of_the_group_is_an_event_and_an_answer(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0, "--mock-step-ms", 20, "--max-restarts", 0)
    client = HttpClient(group.ready["http"])
    plain: list[Answer] = []
    thread = threading.Thread(target=lambda: plain.append(client.post(TEXT, long())))
    with client.opened(TEXT, long(stream=True)) as response:
        thread.start()
        wait_until(lambda: depth(group) == 2, "both run")
        response.readline()
        os.kill(group.pids["frontend"], signal.SIGKILL)
        *_, last, done, rest = response.read().decode().split("\n\n")
    thread.join(30)
    error = strict_json(last.strip().removeprefix("data: "))["error"]
    assert (error["type"], done, rest) == ("overloaded_error", "data: [DONE]", "")
    assert error["code"] == "engine_dead" and "frontend" in error["message"]
    assert (plain[0].status, plain[0].error["code"]) == (503, "engine_dead")
    assert group.finish(30) == 1


def test_a_frontend_that_dies_takes_streams_along_and_whole_answers_begin_anew(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0, "--mock-step-ms", 10)
    client = HttpClient(group.ready["http"])
    plain: list[Answer] = []
    thread = threading.Thread(target=lambda: plain.append(client.post(TEXT, long(max_tokens=100))))
    with client.opened(TEXT, long(stream=True)) as response:
        thread.start()
        wait_until(lambda: depth(group) == 2, "both run")
        response.readline()
        os.kill(group.pids["frontend"], signal.SIGKILL)
        *_, last, done, _ = response.read().decode().split("\n\n")
    error = strict_json(last.strip().removeprefix("data: "))["error"]
    assert (error["code"], done) == ("request_lost", "data: [DONE]")
    thread.join(60)
    assert plain[0].status == 200 and plain[0].json["usage"]["completion_tokens"] == 100
    assert client.post(TEXT, long(max_tokens=2)).status == 200


@pytest.mark.slow
def test_an_http_process_that_dies_is_replaced_and_its_requests_end(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0, "--mock-step-ms", 20)
    client = HttpClient(group.ready["http"])
    with client.opened(TEXT, long(stream=True)) as response:
        response.readline()
        os.kill(group.pids["api-0"], signal.SIGKILL)
        with pytest.raises((http.client.HTTPException, OSError)):
            response.read()
    assert client.post(TEXT, long(max_tokens=2)).status == 200  # the socket is the supervisor's: it waits a while
    expect_idle(group, 10.0)
    assert client.get("/health").status == 200


@pytest.mark.slow
def test_health_is_bad_while_a_process_does_not_answer(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0)
    client = HttpClient(group.ready["http"])
    with group.paused("output"):
        answer = client.get("/health")
        assert (answer.status, answer.json["processes"]["output"]) == (503, "silent")
        assert client.get("/live").status == 200
    wait_until(lambda: client.get("/health").status == 200, "it is well again", 30.0)


def test_ipc_10_a_group_that_ends_lets_streams_finish_and_takes_no_more(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0, "--mock-step-ms", 10, "--drain-timeout", 60)
    client = HttpClient(group.ready["http"])
    with client.opened(TEXT, long(max_tokens=300, stream=True)) as response:
        response.readline()
        group.signal(signal.SIGTERM)
        refused: list[Answer] = []

        def is_refused() -> bool:
            refused[:] = [client.post(TEXT, long(max_tokens=1))]
            return refused[0].status == 503

        wait_until(is_refused, "new requests are refused")
        assert refused[0].error["code"] == "shutting_down" and refused[0].headers["retry-after"]
        assert client.get("/health").status == client.get("/ready").status == 503
        assert client.get("/live").status == 200
        events = response.read().decode()
    assert '"finish_reason":"length"' in events and events.endswith("data: [DONE]\n\n")
    assert group.finish(30) == 0


@pytest.mark.slow
def test_a_drain_that_takes_too_long_ends_streams_with_abort(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0, "--mock-step-ms", 20, "--drain-timeout", 0.2)
    client = HttpClient(group.ready["http"])
    with client.opened(TEXT, long(stream=True)) as response:
        response.readline()
        group.signal(signal.SIGTERM)
        events = response.read().decode()
    assert '"finish_reason":"abort"' in events and events.endswith("data: [DONE]\n\n")
    assert group.finish(30) == 0


@pytest.mark.slow
def test_requests_are_refused_while_the_group_starts(serve: Callable[..., Served]) -> None:
    probe = socket.create_server(("127.0.0.1", 0))
    port = probe.getsockname()[1]
    probe.close()
    group = serve("--port", port, waits=False)
    client = HttpClient(f"http://127.0.0.1:{port}")

    def first() -> Answer | None:
        with contextlib.suppress(OSError):
            return client.get("/ready")
        return None

    answer = wait_until(first, "somebody answers", 30.0)
    assert answer is not None and answer.status in (200, 503)
    group.wait_ready()
    assert client.get("/ready").status == 200


def test_overload_is_an_error_that_says_when_to_come_again(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0, "--mock-step-ms", 50, "--max-queued-requests", 4, "--max-num-seqs", 2)
    client = HttpClient(group.ready["http"])
    body = long(prompt=[as_ids(3, at) for at in range(20)])
    answer = client.post(TEXT, body)
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "overloaded", "1")
    expect_idle(group, 10.0)  # those of the list that were taken do not go on


@pytest.mark.slow
def test_nobody_there_costs_nothing(serve: Callable[..., Served]) -> None:
    group = serve("--port", 0)
    client = HttpClient(group.ready["http"])
    client.post(TEXT, long(max_tokens=2))
    with client.raw(), client.raw():  # idle connections
        before = cpu_seconds(group.pids["api-0"])
        time.sleep(1.0)  # that is what is measured
        assert cpu_seconds(group.pids["api-0"]) - before < 0.02
