"""`procengine drain`, `restart` and `health` on running groups: nothing is lost by them, and they tell the truth."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from procengine import SamplingParams
from procengine.messages import Delta
from tests.procs.canary import ask_status
from tests.procs.harness import Served, as_ids, cli, is_running, key_of, tokens_of, wait_until
from tests.procs.raw_client import RawClient, body
from tests.procs.test_output_death import expect_texts
from tests.procs.test_worker_death import (
    SLEEPER,
    SLOW,
    current_pids,
    expect_exact,
    injected,
    kill,
    submit_load,
    wait_tokens,
)

WAIT_S = 60.0


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(cli(*arguments), capture_output=True, text=True, timeout=WAIT_S, check=False)


def restart(group: Served, process: str, *options: object) -> str:
    done = command("restart", process, "--group", group.name, *options)
    assert done.returncode == 0, done.stderr
    assert f"{process} of group {group.name} is pid {current_pids(group)[process]} now" in done.stdout
    return done.stdout


# --- restart


@pytest.mark.parametrize(
    ("process", "options"),
    [
        pytest.param("worker-0", ("--async-depth", "3", "--decode-steps", "4"), marks=pytest.mark.slow),
        ("worker-0", ("--workers", "2")),
        ("output", ("--async-depth", "2")),
    ],
    ids=str,
)
def test_no_stream_notices_a_restart(
    serve: Callable[..., Served], model: Path, process: str, options: tuple[str, ...]
) -> None:
    """Although no death would be allowed."""
    group = serve(*SLOW, *options, "--max-restarts", "0")
    with RawClient(group.endpoint, drops_repeats=True) as raw:
        for round_ in range(2):
            before = current_pids(group)
            names = [f"{round_} {number}" for number in range(8)]
            for number, name in enumerate(names):
                raw.submit(name, body(as_ids(3 + number, number), max_tokens=120, logprobs=0))
            wait_tokens(raw, names, 5)
            restart(group, process)
            assert not is_running(before[process])
            expect_exact(raw, names, 120)
            expect_texts(raw, names, model)
            for name in names:
                shown = [at.token_ids[0] for delta in raw.deltas(name) for at in delta.logprobs or ()]
                assert shown == raw.token_ids(name), "no log probability is lost"
            after = current_pids(group)
            assert {role for role, pid in after.items() if pid != before[role]} == {process}
    assert "has ended as it was asked to" in group.log and "was killed" not in group.log


@pytest.mark.slow
def test_a_restarted_worker_leaves_its_requests_to_the_other_at_once(serve: Callable[..., Served]) -> None:
    group = serve(*SLOW, "--workers", "2")
    with RawClient(group.endpoint) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names, 5)
        restart(group, "worker-1")
        restart(group, "worker-0")
        expect_exact(raw, names)


def test_the_frontend_finishes_what_runs_while_new_requests_wait(serve: Callable[..., Served]) -> None:
    group = serve(*SLOW, "--max-restarts", "0")
    before = current_pids(group)
    with RawClient(group.endpoint) as raw, group.client() as client:
        names = submit_load(raw)
        wait_tokens(raw, names, 2)
        answers: list[list[int]] = []

        def ask() -> None:
            while not stop.is_set():
                output = client.generate(as_ids(5), SamplingParams(temperature=0, max_tokens=3)).outputs[0]
                answers.append(output.token_ids)

        stop = threading.Event()
        asker = threading.Thread(target=ask)
        asker.start()
        restart(group, "frontend")
        count = len(answers)
        wait_until(lambda: len(answers) > count, "the new one serves")
        stop.set()
        asker.join(WAIT_S)
        expect_exact(raw, names)
        for tokens in answers:
            assert tokens == tokens_of(key_of(tokens[0], 5), 5, 3)
    assert {role for role, pid in current_pids(group).items() if pid != before[role]} == {"frontend"}


@pytest.mark.slow
def test_a_frontend_that_cannot_finish_in_time_stays(serve: Callable[..., Served]) -> None:
    """What came meanwhile is taken, and an abort is heard."""
    group = serve("--mock-step-ms", "20")
    before = current_pids(group)
    with RawClient(group.endpoint) as raw:
        names = submit_long(raw)
        options = ("--group", group.name, "--timeout", "1")
        done = subprocess.Popen(cli("restart", "frontend", *options), stderr=subprocess.PIPE, text=True)
        number = 0
        while done.poll() is None:
            number += 1
            raw.submit(f"waits {number}", body(as_ids(4), max_tokens=2))
            raw.receive_for(0.05)
        _, error = done.communicate()
        assert done.returncode == 1 and "requests did not finish in time" in error
        for at in range(1, number + 1):
            expect_exact(raw, [f"waits {at}"], 2)
        for name in names:
            raw.abort(name)
        raw.wait_ends(*names, timeout_s=WAIT_S)
        assert all(raw.num_ends(name) == 1 for name in names)
    assert current_pids(group) == before


def submit_long(raw: RawClient) -> list[str]:
    """Requests that run for half a minute, and have begun."""
    names = [f"long {number}" for number in range(12)]
    for number, name in enumerate(names):
        raw.submit(name, body(as_ids(3, number), max_tokens=1500))
    wait_tokens(raw, names, 1)
    return names


def test_what_cannot_be_restarted_is_named(serve: Callable[..., Served]) -> None:
    group = serve()
    for process, words in (("worker-7", "worker-0, frontend, output"), ("supervisor", "is none of this group's")):
        done = command("restart", process, "--group", group.name)
        assert (done.returncode, done.stdout) == (1, "")
        assert words in done.stderr and len(done.stderr.splitlines()) == 1
    assert command("restart", "output", "--group", "nowhere").returncode == 1


# --- drain


def test_drain_waits_for_what_runs_and_says_so(serve: Callable[..., Served]) -> None:
    group = serve(*SLOW, "--drain-timeout", "60")
    with RawClient(group.endpoint) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names, 2)
        with group.paused("worker-0"):  # or they end before the command has begun
            drain = subprocess.Popen(
                cli("drain", group.name), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            wait_until(lambda: ask_status(group).processes[0].state == "draining", "it drains", WAIT_S)
        said, error = drain.communicate(timeout=WAIT_S)
        assert (drain.returncode, error) == (0, "")
        assert "12 requests finished, 0 aborted" in said
        assert group.finish() == 0
        expect_exact(raw, names)


@pytest.mark.slow
def test_drain_with_little_time_aborts_and_counts(serve: Callable[..., Served]) -> None:
    group = serve("--mock-step-ms", "20")
    with RawClient(group.endpoint) as raw:
        names = submit_long(raw)
        done = command("drain", group.name, "--timeout", "0")
        assert done.returncode == 0
        assert "0 requests finished, 12 aborted" in done.stdout
        for name in names:
            assert isinstance(end := raw.wait_end(name), Delta) and end.finish_reason == "abort"
    assert group.finish() == 0
    assert command("drain", group.name).returncode == 1, "there is none of that name now"
    assert "timeout" in command("drain", group.name, "--timeout", "-1").stderr


@pytest.mark.slow
def test_drain_of_a_group_that_is_killed_meanwhile_is_an_error(serve: Callable[..., Served]) -> None:
    group = serve("--mock-step-ms", "50", "--drain-timeout", "60")
    with RawClient(group.endpoint) as raw:
        submit_load(raw)
        with subprocess.Popen(cli("drain", group.name), stderr=subprocess.PIPE, text=True) as drain:
            wait_until(lambda: ask_status(group).processes[0].state == "draining", "it drains")
            group.signal(signal.SIGKILL)
            _, error = drain.communicate(timeout=WAIT_S)
        assert drain.returncode == 1
        assert "did not say how" in error


# --- health


def health(group: Served) -> tuple[int, dict[str, Any]]:
    done = command("health", group.name, "--json")
    return done.returncode, dict(json.loads(done.stdout))


def test_a_hung_worker_is_not_healthy(serve: Callable[..., Served], tmp_path: Path) -> None:
    """It answers its supervisor all the time; only its steps bring nothing."""
    group = serve(*SLOW, "--step-timeout", "20", env=injected(tmp_path, SLEEPER))
    with RawClient(group.endpoint) as raw:
        expect_exact(raw, submit_load(raw))
        status, shown = health(group)
        assert (status, shown["healthy"], shown["problems"]) == (0, True, [])
        assert command("health", group.name).stdout == f"{group.name}: live, ready, progressing\n"
        raw.submit("sleeper", body([63, 100, 101], max_tokens=5))
        wait_until(lambda: any(p.state.startswith("stuck") for p in ask_status(group).processes), "it is stuck", WAIT_S)
        status, shown = health(group)
        assert status == 1
        assert (shown["live"], shown["ready"], shown["progressing"]) == (True, True, False)
        (problem,) = shown["problems"]
        assert problem.startswith("worker-0 (pid ") and "stuck" in problem
        (row,) = (line for line in command("ps").stdout.splitlines() if f" {group.pids['worker-0']} " in line)
        assert "stuck" in row and "NO" in row


@pytest.mark.slow
def test_a_stopped_process_and_a_stopped_supervisor_are_not_live(serve: Callable[..., Served]) -> None:
    group = serve()
    with group.paused("output"):
        status, shown = health(group)
        assert (status, shown["live"], shown["ready"], shown["progressing"]) == (1, True, False, False)
    os.kill(group.pid, signal.SIGSTOP)
    try:
        done = command("health", group.name)
        assert done.returncode == 1
        assert done.stdout.startswith(f"{group.name}: not live, not ready, not progressing\n")
    finally:
        os.kill(group.pid, signal.SIGCONT)
    wait_until(lambda: health(group)[0] == 0, "it is well again", WAIT_S)
    assert command("health", "nowhere").returncode == 1


@pytest.mark.slow
def test_a_group_whose_worker_is_being_restarted_is_healthy_if_it_has_another(serve: Callable[..., Served]) -> None:
    group = serve("--workers", "2", "--step-timeout", "20")
    kill(group, "worker-1")
    status, shown = health(group)
    assert status == 0, shown
