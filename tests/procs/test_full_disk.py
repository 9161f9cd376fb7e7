"""No space left: a group that can start starts and serves, one that cannot says so in one line, and leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from procengine import LLM, Client, SamplingParams
from procengine.errors import StartupError
from procengine.groups import find_group, running_groups
from tests.procs.harness import PATIENCE_S, Served, as_ids, cli, finish, key_of, tokens_of, wait_until
from tests.procs.test_start import expect_answers

FULL = Path("/dev/full")  # every write says ENOSPC


@pytest.fixture
def tiny_disk(tmp_path_factory: pytest.TempPathFactory, short_dir: Path) -> Iterator[Path]:
    """A file system of 16 pages."""
    path = short_dir / "tiny disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "procengine-test", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        path.rmdir()
        pytest.skip("needs the right to mount a file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)
    path.rmdir()


def fill(disk: Path, leave_pages: int = 0) -> None:
    """Until nothing, or that much, is left."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4096)
        except OSError:
            filler.truncate(max(filler.tell() - leave_pages * 4096, 0))


def serve_command(model: Path, *options: object) -> list[str]:
    return cli("serve", model, "--device", "mock", "--name", "full", *options)


def test_a_log_that_cannot_be_written_stops_nobody(model: Path) -> None:
    """Neither the start, nor a death that is worth a report, nor the end."""
    with FULL.open("w") as full:
        served = subprocess.Popen(serve_command(model), stdout=subprocess.PIPE, stderr=full)
    try:
        assert served.stdout is not None
        assert b'"event": "ready"' in served.stdout.readline()
        before = find_group("full").pids["worker-0"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: find_group("full").pids["worker-0"] != before, "it is restarted")
        expect_tokens("full")
        served.send_signal(signal.SIGTERM)
        assert finish(served) == 0
    finally:
        served.kill()
        served.wait()
        if served.stdout is not None:
            served.stdout.close()


def expect_tokens(name: str) -> None:
    with Client(name) as client:
        tokens = client.generate(as_ids(5), SamplingParams(temperature=0, max_tokens=9)).outputs[0].token_ids
        assert tokens == tokens_of(key_of(tokens[0], 5), 5, 9)


def test_a_ready_line_that_cannot_be_written_stops_nobody(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with FULL.open("w") as full, log.open("w") as stderr:
        served = subprocess.Popen(serve_command(model), stdout=full, stderr=stderr)
    try:
        wait_until(lambda: "full" in running_names() or served.poll() is not None, "it is ready", 30)
        expect_tokens("full")
        served.send_signal(signal.SIGTERM)
        assert finish(served) == 0
        assert "Traceback" not in log.read_text() and "Exception" not in log.read_text()
    finally:
        served.kill()
        served.wait()


def running_names() -> list[str]:
    return [group.name for group in running_groups()]


def test_a_run_directory_on_a_full_disk_is_one_line(model: Path, tiny_disk: Path) -> None:
    fill(tiny_disk)
    env = {"PROCENGINE_RUN_DIR": str(tiny_disk / "run")}
    done = subprocess.run(
        serve_command(model), capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | env, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line and str(tiny_disk) in line
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROCENGINE_RUN_DIR", str(tiny_disk / "run"))
        with pytest.raises(StartupError, match="No space left on device"):
            LLM(str(model), device="mock")
    assert not list((tiny_disk / "run").glob("*/lock"))


@pytest.mark.slow
def test_a_run_directory_whose_disk_fills_up_later_serves_on(serve: Callable[..., Served], tiny_disk: Path) -> None:
    env = {"PROCENGINE_RUN_DIR": str(tiny_disk / "run")}
    group = serve(env=env)
    fill(tiny_disk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROCENGINE_RUN_DIR", str(tiny_disk / "run"))
        expect_answers(group)
        os.kill(group.pids["worker-0"], signal.SIGKILL)
        wait_until(lambda: "group.json" in group.log, "it says that it could not write down who is there now", 30)
        expect_answers(group)
        os.kill(group.pids["output"], signal.SIGKILL)
        expect_answers(group)
    group.signal(signal.SIGTERM)
    assert group.finish() == 0


@pytest.mark.slow
def test_a_trace_for_a_full_disk_is_one_line(serve: Callable[..., Served]) -> None:
    group = serve()
    command = cli("trace", group.name, "-o", FULL, "--seconds", "0.2")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if "error" in line)
    assert "No space left on device" in line and "Traceback" not in done.stderr
    expect_answers(group)
