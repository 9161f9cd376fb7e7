"""`procengine top` in a terminal of its own, whose screen is read as a user would see it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import pyte
import pytest

from procengine import SamplingParams
from tests.procs.harness import PATIENCE_S, Served, cli, finish
from tests.procs.raw_client import RawClient, body


class Terminal:
    """A command in a pseudo-terminal, and what its screen shows."""

    def __init__(self, *arguments: object, columns: int = 110, lines: int = 40) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._fd, follower = pty.openpty()
        self._set_size(columns, lines)
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        # The first terminal that a session leader opens becomes its own: Ctrl-C and changes of size come from there.
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" <"$0" >"$0"', os.ttyname(follower), *cli(*arguments)],
            stderr=subprocess.PIPE,
            env=env | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        self._follower = follower  # open until the end: before the other side is, reading would fail

    def wait_for(self, *parts: str, timeout_s: float = PATIENCE_S) -> str:
        """Until the screen shows all `parts`; returns its text."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            text = "\n".join(self._screen.display)
            if all(part in text for part in parts):
                return text
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{parts} did not come; the screen:\n{text}"
            if select.select([self._fd], [], [], left_s)[0]:
                self._stream.feed(os.read(self._fd, 1 << 16))

    def resize(self, columns: int, lines: int) -> None:
        """As a window manager does."""
        self._screen.resize(lines, columns)
        self._screen.reset()
        self._set_size(columns, lines)

    def press(self, keys: bytes) -> None:
        """Type."""
        os.write(self._fd, keys)

    def finish(self) -> tuple[int, bytes]:
        """Exit status and stderr, after the end."""
        assert self.process.stderr is not None
        status = finish(self.process)
        return status, self.process.stderr.read()

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        os.close(self._fd)
        os.close(self._follower)


@pytest.fixture
def top() -> Iterator[Callable[..., Terminal]]:
    """Starts `procengine top`; it ends with the test."""
    with ExitStack() as terminals:
        yield lambda *arguments, **size: terminals.enter_context(Terminal("top", *arguments, "--interval", 0.2, **size))


def test_it_shows_what_is_under_way_and_quits_with_q(
    serve: Callable[..., Served], top: Callable[..., Terminal]
) -> None:
    group = serve("--max-num-seqs", 3)
    terminal = top()
    terminal.wait_for("g  ", "running", "0 waiting", "frontend", str(group.pids["worker-0"]), "q quit")
    with RawClient(group.endpoint) as client, group.paused("worker-0"):
        client.submit(
            "r", body([70] * 20, max_tokens=5, n=5)
        )  # one message: all are there when the first step is planned
        terminal.wait_for("3 2 waiting")
        terminal.wait_for("silent")
    terminal.wait_for("5 ended")
    terminal.press(b"q")
    assert terminal.finish() == (0, b"")


def test_it_follows_the_size_of_the_terminal(serve: Callable[..., Served], top: Callable[..., Terminal]) -> None:
    serve()
    terminal = top(columns=110, lines=40)
    wide = terminal.wait_for("latency, ms", "processes")
    assert any("throughput" in line and "latency" in line for line in wide.splitlines())
    terminal.resize(60, 40)
    narrow = terminal.wait_for("latency, ms", "processes")
    assert not any("throughput" in line and "latency" in line for line in narrow.splitlines())
    terminal.press(b"\x03")  # Ctrl-C
    assert terminal.finish() == (0, b"")


def test_it_waits_for_a_group_and_survives_its_restart(
    serve: Callable[..., Served], top: Callable[..., Terminal]
) -> None:
    terminal = top("phoenix")
    terminal.wait_for("waiting for group", "no group 'phoenix' is running")
    first = serve(name="phoenix")
    terminal.wait_for(str(first.pids["frontend"]))
    first.signal(signal.SIGKILL)
    terminal.wait_for("group phoenix has ended", "waiting for group")
    first.stop()
    second = serve(name="phoenix")
    terminal.wait_for(str(second.pids["frontend"]), "0 ended")
    with second.client() as client:
        client.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))
    terminal.wait_for("1 ended")
    terminal.press(b"q")
    assert terminal.finish()[0] == 0


# --- without a terminal


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(cli("top", *arguments), capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_once_is_plain_text_and_json_an_object(serve: Callable[..., Served]) -> None:
    group = serve("--workers", 2)
    with group.client() as client:
        client.generate(["a", "b"], SamplingParams(max_tokens=4, ignore_eos=True))
    done = run("--once", "--interval", 0.2)
    assert (done.returncode, done.stderr) == (0, "") and "\x1b" not in done.stdout
    assert "2 ended" in done.stdout and "q quit" not in done.stdout
    found = json.loads(run("g", "--json", "--interval", 0.2, "--window", 60).stdout)
    assert found["group"] == "g"
    assert {process["name"]: process["pid"] for process in found["processes"]} == group.pids
    assert all(process["cpu_share"] is not None for process in found["processes"])
    assert [worker["rank"] for worker in found["workers"]] == [0, 1]
    assert found["totals"]["requests"]["length"] == 2 and found["totals"]["output_tokens"] == 8
    window = found["window"]
    assert window["output_tokens"] * window["seconds"] == pytest.approx(8)
    assert window["ttft_ms"]["p50"] > 0


@pytest.mark.parametrize(
    ("group", "error"), [("nobody", "no group 'nobody' is running"), ("tcp://x:1", "'tcp://x:1' does not run on this")]
)
def test_without_a_group_it_says_so(group: str, error: str) -> None:
    done = run(group, "--once")
    assert done.returncode == 1 and done.stderr.startswith("procengine: error: ") and error in done.stderr


@pytest.mark.parametrize(("option", "value"), [("interval", "0"), ("window", "0.5"), ("window", "nan")])
def test_wrong_options_are_refused_by_name(option: str, value: str) -> None:
    done = run("--once", f"--{option}", value)
    assert done.returncode == 1 and f"error: {option}: must be between" in done.stderr
