"""`EngineProcess`: one engine in a process of its own, which loads once and runs what it is told.

Owns: the process and all below it, its pipes and deadlines, stopping it while others run. Never does: read figures.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

from procengine.bench.peers.answers import EngineError, Ran, Ready, encode_load, read_answer
from procengine.bench.peers.loads import Load
from procengine.bench.peers.results import EngineSpec
from procengine.child_process import cpu_seconds

__all__ = ["EngineProcess"]

_CLOSE_WAIT_S: Final = 20.0
_NUM_LAST_LINES: Final = 8
_READ_BYTES: Final = 1 << 16


class EngineProcess:
    """A running engine. What it writes to stderr goes to `log`, and its last lines into errors.

    Raises (all methods that talk to it):
        EngineError: it failed, ended, or took longer than the limit.
    """

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        self.spec = spec
        self._log = log
        self._is_paused = False
        self._buffer = b""
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                spec.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is ours: the engines are ended in order
                env={**os.environ, **spec.environment},
                bufsize=0,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin_fd, self._stdout_fd = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin_fd, False)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> Ready:
        """Wait until it has loaded."""
        answer = self._read_answer(time.monotonic() + timeout_s, timeout_s)
        if not isinstance(answer, Ready):
            raise EngineError(f"it answered before it was ready: {answer}")
        return answer

    def run(self, load: Load, timeout_s: float) -> Ran:
        """Have it run `load`, and wait."""
        self.resume()
        deadline_s = time.monotonic() + timeout_s
        self._write(encode_load(load) + b"\n", deadline_s)
        answer = self._read_answer(deadline_s, timeout_s)
        if not isinstance(answer, Ran):
            raise EngineError(f"it did not answer what it was asked: {answer}")
        return answer

    def pause(self) -> None:
        """Stop it where it stands, with all below it."""
        self._signal_all(signal.SIGSTOP)
        self._is_paused = True

    def resume(self) -> None:
        """Let it go on, if it was stopped."""
        if self._is_paused:
            self._signal_all(signal.SIGCONT)
            self._is_paused = False

    def cpu_s(self) -> float:
        """CPU time that it and all below it have used; what has ended does not count."""
        return sum(map(cpu_seconds, self._pids()))

    def busy_share(self, seconds: float) -> float:
        """CPU time that it uses during the next seconds, in cores; asked while it has nothing to do."""
        pids = self._pids()
        begin = {pid: cpu_seconds(pid) for pid in pids}
        time.sleep(seconds)
        return sum(max(cpu_seconds(pid) - begin[pid], 0.0) for pid in pids) / seconds

    def peak_rss_mib(self) -> float:
        """Most memory that its processes ever had resident, added up: shared pages count again (proc(5), VmHWM)."""
        return sum(map(_peak_rss_kib, self._pids())) / 1024

    def close(self, wait_s: float = _CLOSE_WAIT_S) -> None:
        """Have it end, within `wait_s`, then make it and all below it. Closing twice is fine."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.resume()
        with contextlib.ExitStack() as pidfds:
            below = [_open_pidfd(pid, pidfds) for pid in self._pids()]  # a number may be another process's by then
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
            for pidfd in filter(None, below):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _write(self, data: bytes, deadline_s: float) -> None:
        while data:
            _, writable, _ = select.select([], [self._stdin_fd], [], max(0.0, deadline_s - time.monotonic()))
            if not writable:
                raise EngineError(f"it does not read what it is asked{self._last_lines()}")
            try:
                data = data[os.write(self._stdin_fd, data) :]
            except BrokenPipeError:
                raise EngineError(f"it has ended{self._last_lines()}") from None

    def _read_answer(self, deadline_s: float, timeout_s: float) -> Ready | Ran:
        try:
            return read_answer(self._read_line(deadline_s, timeout_s))
        except EngineError as error:
            raise EngineError(f"{error}{self._last_lines()}") from error

    def _read_line(self, deadline_s: float, timeout_s: float) -> bytes:
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._stdout_fd], [], [], max(0.0, deadline_s - time.monotonic()))
            if not readable:
                raise EngineError(f"no answer within {timeout_s:g} s")
            data = os.read(self._stdout_fd, _READ_BYTES)
            if not data:
                raise EngineError("it has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_lines(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return "".join(f"\n    {line[:200]}" for line in lines[-_NUM_LAST_LINES:])

    def _pids(self) -> list[int]:
        """It and all below it, parents first; none when it has ended."""
        if self._process.poll() is not None:
            return []
        children = _children_by_parent()
        found = [self._process.pid]
        for pid in found:
            found += children.get(pid, ())  # grows while we go through it
        return found

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _children_by_parent() -> dict[int, list[int]]:
    """All processes, by their parents' ids (proc(5), stat)."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found.setdefault(int(fields[1]), []).append(int(folder.name))
    return found


def _open_pidfd(pid: int, exits: contextlib.ExitStack) -> int | None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    exits.callback(os.close, pidfd)
    return pidfd


def _peak_rss_kib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0
