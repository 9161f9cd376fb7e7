"""However a group ends, every client hears of it and no process is left (IPC-01, IPC-02)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from procengine import AsyncClient, SamplingParams
from procengine.client import Client
from procengine.errors import EngineDeadError, GroupNotFoundError, ShuttingDownError
from procengine.messages import Delta, Rejected
from tests.procs.canary import ask_status
from tests.procs.faults.injection import Injector
from tests.procs.harness import (
    Served,
    as_ids,
    descendants,
    finish,
    has_line,
    is_running,
    key_of,
    tokens_of,
    wait_until,
)
from tests.procs.raw_client import RawClient, body

GONE_S = 10.0
STOP_GRACE_S = 5.0  # after which the supervisor kills whoever has not ended
SLOW = ("--mock-step-ms", 5, "--max-num-seqs", 64)
LONG = SamplingParams(temperature=0, max_tokens=1500)


def start_load(raw: RawClient, count: int = 16, max_tokens: int = 1500) -> list[str]:
    """Requests that run for seconds; half of them are of a kind whose tokens have begun to come."""
    names = [f"r{number}" for number in range(count)]
    for number, name in enumerate(names):
        raw.submit(name, body(as_ids(5 + number), max_tokens=max_tokens))
    raw.wait_for(lambda m: isinstance(m, Delta) and m.request_id == names[-1])
    return names


def expect_all_told(raw: RawClient, names: list[str], timeout_s: float = GONE_S) -> None:
    """Each request has one terminal message of its own, or the client heard that the whole group is going."""
    deadline_s = time.monotonic() + timeout_s
    while not all(raw.num_ends(name) for name in names) and not _is_group_gone(raw):
        assert time.monotonic() < deadline_s, f"nobody told the client; last messages: {raw.messages[-3:]}"
        raw.receive(0.1)
    assert all(raw.num_ends(name) <= 1 for name in names)
    for name in names:
        assert raw.token_ids(name) == tokens_of(int(name[1:]), 5 + int(name[1:]), len(raw.token_ids(name)))


def _is_group_gone(raw: RawClient) -> bool:
    return any(isinstance(m, Rejected) and m.request_id == "" and m.code == "engine_dead" for m in raw.messages)


# --- the supervisor is killed


def test_nothing_outlives_a_supervisor_that_is_killed_under_load(serve: Callable[..., Served]) -> None:
    group = serve(*SLOW)
    assert sorted(descendants(group.pid)) == sorted(pid for pid in group.pids.values() if pid != group.pid)
    with RawClient(group.endpoint) as raw, group.client() as client:
        start_load(raw)
        group.signal(signal.SIGKILL)
        group.expect_gone(GONE_S)
        started_s = time.monotonic()
        with pytest.raises(EngineDeadError, match="gone"):
            client.generate([70])
        assert time.monotonic() - started_s < 10, "it took the client long to notice"
        with pytest.raises(GroupNotFoundError):
            Client(group.endpoint)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
def test_a_signal_during_the_start_leaves_nothing(serve: Callable[..., Served], number: signal.Signals) -> None:
    group = serve(waits=False)
    children = wait_until(lambda: descendants(group.pid), "the first child is there", 20)
    group.signal(number)
    status = finish(group.process)
    wait_until(
        lambda: not any(is_child_of(entry, group) for entry in Path("/proc").iterdir()),
        f"the children {children} and their later siblings are gone",
        GONE_S,
    )
    assert status == {signal.SIGKILL: -9}.get(number, 0)


def is_child_of(entry: Path, group: Served) -> bool:
    """Whether a process (its directory in /proc) was started by this supervisor, as its command line says."""
    try:
        arguments = (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"--parent" in arguments and arguments[arguments.index(b"--parent") + 1] == str(group.pid).encode()


# --- it is asked to end


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=lambda n: n.name
)
def test_a_signal_ends_an_idle_group_at_once(serve: Callable[..., Served], number: signal.Signals) -> None:
    group = serve()
    with group.client() as client:
        client.generate([70])
        started_s = time.monotonic()
        group.signal(number)
        assert group.finish() == 0
        assert time.monotonic() - started_s < STOP_GRACE_S  # none had to be killed
        with pytest.raises(EngineDeadError):
            client.generate([70])
    assert "Traceback" not in group.log
    assert not Path(group.endpoint.removeprefix("ipc://")).parent.exists(), "its run directory was left"


def test_draining_finishes_what_runs_and_refuses_what_comes(serve: Callable[..., Served]) -> None:
    """IPC-10: running and queued requests and one that is being tokenized finish; new ones hear why not."""
    group = serve("--mock-step-ms", 3, "--max-num-seqs", 4)
    with RawClient(group.endpoint) as raw, group.client() as client:
        for number in range(6):
            raw.submit(f"r{number}", body(as_ids(5), max_tokens=120))
        raw.wait_for(lambda m: isinstance(m, Delta) and m.request_id == "r3")
        raw.submit("text", body("a" * 50, max_tokens=5))
        raw.stats()
        group.signal(signal.SIGTERM)
        wait_until(lambda: frontend_state(group) == "draining", "the frontend drains")
        raw.submit("late", body([70]))
        assert raw.rejection("late").code == "shutting_down"
        with pytest.raises(ShuttingDownError):
            client.generate([70])
        with group.client() as newcomer, pytest.raises(ShuttingDownError):
            newcomer.generate([70])
        assert group.finish() == 0
        for number in range(6):
            end = raw.wait_end(f"r{number}")
            assert isinstance(end, Delta) and end.finish_reason == "length"
            assert raw.token_ids(f"r{number}") == tokens_of(number, 5, 120)
            assert raw.num_ends(f"r{number}") == 1
        assert len(raw.token_ids("text")) == 5
    assert "Traceback" not in group.log


def frontend_state(group: Served) -> str:
    return next(process.state for process in ask_status(group).processes if process.role == "frontend")


def test_a_drained_stream_has_its_end_although_the_output_process_is_late(serve: Callable[..., Served]) -> None:
    """The frontend has all tokens first; it is not drained before the client has been sent the text."""
    group = serve("--mock-step-ms", 2)
    with group.client() as client, RawClient(group.endpoint) as stats:
        stream = client.stream(as_ids(5), SamplingParams(temperature=0, max_tokens=100))
        token_ids = [*next(stream).token_ids]
        with group.paused("output"):
            group.signal(signal.SIGTERM)
            wait_until(lambda: stats.stats()["output_tokens"] == 100, "all tokens are computed")
            assert ask_status(group).processes[0].state == "draining"
            assert is_running(group.pids["frontend"])
        for delta in stream:
            token_ids += delta.token_ids
        assert delta.finish_reason == "length"
        assert token_ids == tokens_of(0, 5, 100)
        assert group.finish() == 0


def test_what_does_not_finish_in_time_is_aborted(serve: Callable[..., Served]) -> None:
    group = serve(*SLOW, "--drain-timeout", 0.5)
    with RawClient(group.endpoint) as raw:
        names = start_load(raw)
        group.signal(signal.SIGTERM)
        assert group.finish() == 0
        for name in names:
            end = raw.wait_end(name)
            assert isinstance(end, Delta) and end.finish_reason == "abort"
            assert raw.num_ends(name) == 1
    assert "Traceback" not in group.log


def test_a_second_signal_ends_it_now(serve: Callable[..., Served]) -> None:
    group = serve(*SLOW, "--drain-timeout", 60)
    with RawClient(group.endpoint) as raw:
        start_load(raw)
        group.signal(signal.SIGINT)
        wait_until(lambda: frontend_state(group) == "draining", "it drains")
        group.signal(signal.SIGINT)
        started_s = time.monotonic()
        assert group.finish() == 1
        assert time.monotonic() - started_s < STOP_GRACE_S  # nobody was waited for


def test_a_request_between_the_last_one_and_the_end_is_refused(serve: Callable[..., Served]) -> None:
    """The frontend has drained, the supervisor has not told it to go yet: the group is still shutting down."""
    group = serve()
    with RawClient(group.endpoint) as raw:
        with group.paused("frontend"):
            group.signal(signal.SIGTERM)
            wait_until(lambda: ask_status(group).processes[0].state == "draining", "the supervisor drains")
            os.kill(group.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: _is_refused(raw), "a request is refused")
            raw.submit("later", body([70]))
            assert raw.rejection("later").code == "shutting_down"
        finally:
            os.kill(group.pid, signal.SIGCONT)
        assert group.finish() == 0


def _is_refused(raw: RawClient) -> bool:
    raw.submit("probe", body([70], max_tokens=1))
    end = raw.wait_end("probe")
    raw.messages.remove(end)
    return isinstance(end, Rejected)


# --- a child dies


ROLES = ["worker-0", "frontend", "output"]
NO_RESTARTS = ("--max-restarts", "0")


@pytest.mark.parametrize("role", ROLES)
def test_a_child_that_dies_under_load_ends_the_group_and_everybody_hears_why(
    serve: Callable[..., Served], role: str
) -> None:
    """IPC-01: plain requests and streams, of bare sockets and of both clients."""
    group = serve(*SLOW, *NO_RESTARTS)

    async def call(raw: RawClient) -> list[object]:
        async with AsyncClient(group.endpoint) as client:

            async def read() -> None:
                async for _ in client.stream(as_ids(3), LONG):
                    started.set()

            started = asyncio.Event()
            calls: list[Coroutine[Any, Any, object]] = [read() for _ in range(8)]
            calls += [client.generate(as_ids(3), LONG) for _ in range(8)]
            tasks = [asyncio.create_task(call) for call in calls]
            await asyncio.wait_for(started.wait(), 5)
            write_to_log_of(group, role, "first words\n\nlast words of it\n")
            os.kill(group.pids[role], signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), GONE_S)

    with RawClient(group.endpoint) as raw, group.client() as client:
        names = start_load(raw)
        stream = client.stream(as_ids(3), LONG)
        next(stream)
        for error in asyncio.run(call(raw)):
            assert isinstance(error, EngineDeadError) and role in str(error)
        expect_all_told(raw, names)
        with pytest.raises(EngineDeadError, match=role):
            list(stream)
        assert group.finish() == 1
        with pytest.raises(EngineDeadError):
            client.generate([70])
    expect_report(group, role, "SIGKILL")
    assert "Traceback" not in group.log


@pytest.mark.parametrize("role", ["worker-0", "output", pytest.param("frontend", marks=pytest.mark.slow)])
def test_a_child_that_dies_while_nothing_runs_ends_the_group(serve: Callable[..., Served], role: str) -> None:
    group = serve(*NO_RESTARTS)
    with group.client() as client:
        write_to_log_of(group, role, "last words of it\n")
        os.kill(group.pids[role], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"{role}|is gone"):  # the request may come before the news or after
            client.generate([70], SamplingParams(max_tokens=2000))
        assert group.finish(3) == 1
    expect_report(group, role, "SIGKILL")


def write_to_log_of(group: Served, role: str, text: str) -> None:
    """What a child might say before it dies."""
    with Path(f"/proc/{group.pids[role]}/fd/2").open("w") as stderr:
        stderr.write(text)
    wait_until(lambda: text.strip() in group.log, "its log is passed on")


def expect_report(group: Served, role: str, how: str) -> None:
    """Who died, how, and behind that its last lines."""
    assert has_line(group.log, f"procengine: {role} (pid {group.pids[role]})", how)
    report = group.log[group.log.index("procengine: ") :]
    assert "last log lines" in report and "last words of it" in report


@pytest.mark.parametrize("role", ["frontend", pytest.param("output", marks=pytest.mark.slow), "worker"])
def test_an_error_that_nothing_expected_ends_the_group(serve: Callable[..., Served], tmp_path: Path, role: str) -> None:
    """A broken invariant or a dead thread must not be logged and forgotten: whoever waits would wait for ever."""
    injector = Injector(tmp_path)
    group = serve(*SLOW, *NO_RESTARTS, env=injector.environment)
    with RawClient(group.endpoint) as raw:
        names = start_load(raw)
        injector.arm(role, "step", "raise")
        expect_all_told(raw, names)
        assert group.finish() == 1
    assert has_line(group.log, f"procengine: {role}", "(pid", "exited with status 1", "Error")
    assert "Traceback" in group.log


def test_a_client_whose_group_was_replaced_by_another_of_its_name_is_told(serve: Callable[..., Served]) -> None:
    """A service manager restarts a killed group at once; the old one's requests are lost all the same.

    A client that blocks looks at its group only while it waits: here, when the new one is up already.
    """
    first = serve(*SLOW)
    with first.client() as client, first.client() as idle:
        stream = client.stream(as_ids(3), LONG)
        next(stream)
        first.signal(signal.SIGKILL)
        first.expect_gone()
        second = serve(*SLOW)
        with pytest.raises(EngineDeadError):
            list(stream)
        # One that had nothing under way may as well go on with the new group.
        with contextlib.suppress(EngineDeadError):
            assert idle.generate([70]).outputs[0].token_ids == tokens_of(0, 1, 16)
        with second.client() as fresh:
            token_ids = fresh.generate([70]).outputs[0].token_ids
            assert token_ids == tokens_of(key_of(token_ids[0], 1), 1, 16)
