"""Launches a process group from a program: a supervisor of its own that dies with the caller.

Owns: the supervisor's process and the pipe that tells it of our death. Never does: talk to the group.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from procengine.child_process import memory_file
from procengine.config import EngineConfig
from procengine.errors import StartupError

__all__ = ["Group", "launch_group"]

_CLOSE_WAIT_S = 20.0
_pipes: set[int] = set()  # our ends of the death pipes


def _close_pipe(pipe_fd: int) -> None:
    if pipe_fd in _pipes:  # otherwise this is a forked child, and it never was its own
        _pipes.remove(pipe_fd)
        os.close(pipe_fd)


def _close_all_pipes() -> None:
    for pipe_fd in list(_pipes):
        _close_pipe(pipe_fd)


# A forked child (multiprocessing's are) has copies, and the supervisor would wait for them to close as well.
os.register_at_fork(after_in_child=_close_all_pipes)


class Group:
    """A running group. Close it, or let the process end: the supervisor sees its pipe close and ends the group."""

    def __init__(self, process: subprocess.Popen[bytes], pipe_fd: int, ready: dict[str, Any]) -> None:
        self.ready = ready
        self._process = process
        self._pipe_fd: int | None = pipe_fd

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return str(self.ready["endpoint"])

    def close(self) -> int:
        """End the group and wait for it. Returns the supervisor's exit status; closing twice is fine."""
        if self._pipe_fd is not None:
            _close_pipe(self._pipe_fd)
            self._pipe_fd = None
        return _wait(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def launch_group(config: EngineConfig, *, log_to: IO[bytes] | int | None = None) -> Group:
    """Start a group and wait until it is ready. `log_to` takes its log; None is our own stderr.

    Raises:
        StartupError: it did not come up; says which process failed and shows its last log lines.
    """
    death_pipe, pipe_fd = os.pipe()
    _pipes.add(pipe_fd)
    config_fd = memory_file(msgspec.json.encode(config))
    arguments = ["--config-fd", str(config_fd), "--launcher-fd", str(death_pipe)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "procengine.procs.supervisor", *arguments],
        pass_fds=(config_fd, death_pipe),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log_to,
        start_new_session=True,  # Ctrl-C is ours to handle: we close the group
    )
    os.close(config_fd)
    os.close(death_pipe)
    try:
        ready = _read_ready(process, config.group.start_timeout_s)
    except BaseException:
        _close_pipe(pipe_fd)
        _wait(process)
        raise
    return Group(process, pipe_fd, ready)


def _read_ready(process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    deadline_s = time.monotonic() + timeout_s + 5.0  # the supervisor gives up first, and says why
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        data = os.read(process.stdout.fileno(), 65536) if readable else b""
        if not data:
            raise StartupError(f"the supervisor said nothing and {'ended' if readable else 'did not answer in time'}")
        line += data
    event: dict[str, Any] = json.loads(line)
    if event["event"] != "ready":
        raise StartupError(event["error"])
    return event


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        process.wait(_CLOSE_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its children follow (PR_SET_PDEATHSIG)
    if process.stdout is not None:
        process.stdout.close()
    return process.wait()
