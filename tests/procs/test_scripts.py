"""A script that launched a group for itself: however it ends, nothing of the group is left (IPC-02)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from procengine import Client
from tests.procs.harness import descendants, finish, is_running, tokens_of, wait_until

GONE_S = 10.0
Start = Callable[[str], "Script"]

_BEGINNING = """
import json, os, sys, time
from procengine import LLM, SamplingParams
llm = LLM(sys.argv[1], device="mock", mock_step_ms=2)
result = llm.generate([[70, 71]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
print(json.dumps({"token_ids": result[0].outputs[0].token_ids, "name": llm.config.group.name}), flush=True)
"""
_GENERATE = "llm.generate([[70]], SamplingParams(max_tokens=2000), use_tqdm=False)"
_WAIT = "time.sleep(60)"
_GO_ON = "sys.stdin.readline()"  # the test looks at the processes first


class Script:
    """A Python script with an `LLM` in it and an ending of choice."""

    def __init__(self, source: str, folder: Path, model: Path) -> None:
        path, self._log = folder / "script.py", folder / "script.log"
        path.write_text(source)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, path, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )

    def read_line(self) -> bytes:
        """The next line it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended: {self.log}"
        return line

    def wait_started(self) -> tuple[dict[str, Any], list[int]]:
        """What it says when its group has answered, and the group's processes."""
        event = dict(json.loads(self.read_line()))
        assert event["token_ids"] == tokens_of(0, 2, 4)
        pids = descendants(self.process.pid)
        assert len(pids) == 4, "a supervisor and three children were expected"
        return event, pids

    def go_on(self) -> None:
        """Let it come to its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    @property
    def log(self) -> str:
        """What it and its group wrote to stderr."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End it and all below it."""
        for pid in [*descendants(self.process.pid), self.process.pid] if self.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    scripts: list[Script] = []

    def start_one(ending: str) -> Script:
        scripts.append(Script(_BEGINNING + ending + "\n", tmp_path, model))
        return scripts[-1]

    yield start_one
    for script in scripts:
        script.stop()


def expect_gone(pids: list[int], name: str | None = None) -> None:
    wait_until(lambda: not any(map(is_running, pids)), f"the group's processes {pids} are gone", GONE_S)
    if name is not None:
        run_dir = Path(os.environ["PROCENGINE_RUN_DIR"]) / name
        assert not run_dir.exists(), "the run directory was left"


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("os._exit(3)", 3), ("os.execv('/bin/true', ['true'])", 0)],
    ids=["it just ends", "os._exit", "an exec"],
)
def test_nothing_outlives_a_script_that_never_called_close(start: Start, ending: str, status: int) -> None:
    script = start(f"{_GO_ON}\n{ending}")
    event, pids = script.wait_started()
    script.go_on()
    assert finish(script.process) == status
    expect_gone(pids, event["name"])
    assert script.log == ""


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM))],
    ids=lambda number: number.name,
)
def test_nothing_outlives_a_script_that_is_killed_at_work(start: Start, number: signal.Signals) -> None:
    script = start(_GENERATE)
    _, pids = script.wait_started()
    script.process.send_signal(number)
    assert finish(script.process) == -number
    expect_gone(pids)


def test_a_call_that_is_interrupted_leaves_a_usable_llm(start: Start) -> None:
    """Ctrl-C in a notebook: the requests are aborted, the group stays."""
    caught = f"try: {_GENERATE}\nexcept KeyboardInterrupt: print('caught', flush=True)"
    again = "print(llm.generate([[70]] * 2, SamplingParams(max_tokens=3), use_tqdm=False)[1].outputs[0].token_ids)"
    script = start(f"{caught}\n{again}")
    event, pids = script.wait_started()
    with Client(event["name"]) as client:
        wait_until(lambda: client.stats()["num_steps"] > 10, "its request runs")
    script.process.send_signal(signal.SIGINT)
    assert script.read_line() == b"caught\n"
    assert json.loads(script.read_line()) == tokens_of(3, 1, 3)
    assert finish(script.process) == 0
    expect_gone(pids, event["name"])


def test_nothing_outlives_a_script_that_is_killed_while_its_group_starts(start: Start) -> None:
    script = start("")
    pids = wait_until(lambda: descendants(script.process.pid), "the supervisor is there", 20)
    script.process.kill()
    script.process.wait()
    expect_gone(pids)


def test_closing_is_quick_although_a_forked_child_holds_our_descriptors(start: Start) -> None:
    """multiprocessing forks: its workers have a copy of the pipe whose end the supervisor waits for."""
    script = start(
        f"forked = os.fork() or os._exit({_WAIT})\n{_GO_ON}\nllm.close()\nprint(forked, flush=True)\n{_WAIT}"
    )
    json.loads(script.read_line())
    pids = wait_until(lambda: five_below(script), "the group and the forked child are there")
    started_s = time.monotonic()
    script.go_on()
    forked = int(script.read_line())
    assert time.monotonic() - started_s < 5
    assert is_running(forked)
    expect_gone([pid for pid in pids if pid != forked])


def test_nothing_outlives_a_killed_script_although_a_forked_child_does(start: Start) -> None:
    script = start(f"print(os.fork() or os._exit({_WAIT}), flush=True)\n{_WAIT}")
    event = dict(json.loads(script.read_line()))
    forked = int(script.read_line())
    try:
        pids = wait_until(lambda: five_below(script), "the group and the forked child are there")
        script.process.kill()
        script.process.wait()
        assert is_running(forked)
        expect_gone([pid for pid in pids if pid != forked], event["name"])
    finally:
        os.kill(forked, signal.SIGKILL)


def five_below(script: Script) -> list[int]:
    """The group's four processes and a forked child, once all are there."""
    pids = descendants(script.process.pid)
    return pids if len(pids) == 5 else []
