"""The command line against groups of the mock device, as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from procengine.tokenizer import Tokenizer
from tests.procs.harness import PATIENCE_S, Served, cli, descendants, finish, is_running, key_of, tokens_of, wait_until
from tests.procs.raw_client import RawClient, body


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    return serve_module("--mock-step-ms", 1, name="cli")


def run(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A command that must succeed."""
    done = subprocess.run(cli(*arguments), input=stdin, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done


def ps_json() -> Any:
    return json.loads(run("ps", "--json").stdout)


def test_ps_shows_every_process_of_every_group(group: Served) -> None:
    (found,) = ps_json()
    assert (found["group"], found["endpoint"], found["model"]) == ("cli", group.endpoint, group.ready["model"])
    processes = {f"{p['role']}-{p['rank']}" if p["role"] == "worker" else p["role"]: p for p in found["processes"]}
    assert {name: process["pid"] for name, process in processes.items()} == group.pids
    for process in processes.values():
        assert set(process) == {
            "role",
            "rank",
            "pid",
            "state",
            "uptime_s",
            "rss_bytes",
            "cpu_s",
            "queue_depth",
            "num_restarts",
            "live",
            "ready",
            "progressing",
            "waited_s",
        }
        assert process["state"] == "ready" and process["uptime_s"] > 0 and process["queue_depth"] == 0
        assert 5 << 20 < process["rss_bytes"] < 120 << 20 and process["cpu_s"] > 0


def test_ps_shows_what_is_under_way_and_what_is_silent(group: Served) -> None:
    with RawClient(group.endpoint) as client, group.paused("worker-0"):
        for number in range(7):
            client.submit(f"r{number}", body([70], max_tokens=2))
        client.stats()
        (found,) = ps_json()
        processes = {process["role"]: process for process in found["processes"]}
        assert processes["frontend"]["queue_depth"] == processes["output"]["queue_depth"] == 7
        assert processes["worker"]["state"] == "silent"
    table = run("ps").stdout.splitlines()
    assert table[0].split()[:5] == ["GROUP", "MODEL", "ROLE", "RANK", "PID"]
    assert len(table) == 1 + len(group.pids)


@pytest.mark.slow
def test_ps_says_when_a_supervisor_does_not_answer(group: Served) -> None:
    with group.paused("supervisor"):
        (found,) = ps_json()
        assert "did not answer" in found["error"] and found["processes"] == []


def test_chat_asks_the_running_group(group: Served) -> None:
    once = run("chat", "--max-tokens", 12, "--system", "be brief", "hello")
    assert once.stderr == "" and once.stdout.endswith("\n") and len(once.stdout) > 12
    conversation = run("chat", "--group", "cli", "--max-tokens", 8, stdin="hello\n\n/clear\nhow are you\n")
    assert conversation.stderr == ""
    assert len(conversation.stdout.splitlines()) >= 2


def test_chat_in_a_group_that_is_not_there_says_so(group: Served) -> None:
    done = subprocess.run(
        cli("chat", "--group", "nobody", "hi"), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "procengine: error: no group 'nobody' is running; running: cli\n"


def test_generate_prints_one_object_a_prompt_and_leaves_nothing(model: Path) -> None:
    done = run(
        "generate", model, "--device", "mock", "--json", "--max-tokens", 6, "--max-num-seqs", 4, "first", "-", stdin="x"
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["prompt"] for result in results] == ["first", "x"]
    tokenizer = Tokenizer.load(model / "tokenizer.json")
    keys = set()
    for result in results:
        (output,) = result["outputs"]
        length = len(result["prompt"])
        keys.add(key_of(output["token_ids"][0], length))
        assert output["token_ids"] == tokens_of(key_of(output["token_ids"][0], length), length, 6)
        assert output["text"] == tokenizer.decode(output["token_ids"])
        assert (output["index"], output["finish_reason"]) == (0, "length")
        assert result["prompt_token_ids"] == tokenizer.encode(result["prompt"])
        assert result["usage"] == {
            "prompt_tokens": length,
            "completion_tokens": 6,
            "total_tokens": length + 6,
            "cached_tokens": 0,
        }
    assert keys == {0, 1}
    assert done.stderr == "", "a good run is quiet where nobody watches"


@pytest.mark.slow
def test_generate_as_text_and_as_chat(model: Path) -> None:
    plain = run("generate", model, "--device", "mock", "--max-tokens", 6, "--chat", "hi", "there")
    assert len(plain.stdout.splitlines()) >= 2


def test_generate_that_is_interrupted_leaves_nothing(model: Path) -> None:
    process = subprocess.Popen(
        cli("generate", model, "--device", "mock", "--mock-step-ms", 20, "--max-tokens", 1000, "hi"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        pids = wait_until(lambda: four_below(process.pid), "its group is there", 20)
        wait_until(lambda: answers(process.pid), "its group is ready", 20)
        process.send_signal(signal.SIGINT)
        assert finish(process) == 130
        wait_until(lambda: not any(map(is_running, pids)), f"{pids} are gone")
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def four_below(pid: int) -> list[int]:
    pids = descendants(pid)
    return pids if len(pids) == 4 else []


def answers(pid: int) -> bool:
    """Whether the private group of a `generate` is ready: it has written its description."""
    return (Path(os.environ["PROCENGINE_RUN_DIR"]) / f"generate-{pid}" / "group.json").exists()


def test_a_wrong_prompt_is_one_line_and_status_1(model: Path) -> None:
    done = subprocess.run(
        cli("generate", model, "--device", "mock", "--max-tokens", 4096, "hi"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("procengine: error: max_tokens: 4096") and "2048" in line
