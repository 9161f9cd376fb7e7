"""`ChildProcess`: the supervisor's handle of one child: how it is started, its last words, how it ended.

Owns: the process, its pidfd and its log pipe. Never does: decide what a death means.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import msgspec

from procengine.child import DUMP_SIGNAL
from procengine.config import EngineConfig
from procengine.gpu_placement import Placement, place_worker

__all__ = [
    "ChildProcess",
    "child_name",
    "cpu_seconds",
    "memory_file",
    "peak_rss_bytes",
    "rss_bytes",
    "write_log",
    "write_to",
]

_NUM_LAST_LINES = 30
_STDERR = 2


def memory_file(data: bytes) -> int:
    """A descriptor to read `data` from: how a configuration reaches a process without a file or an argument."""
    fd = os.memfd_create("procengine-config")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def child_name(role: str, rank: int) -> str:
    """`worker-0`; roles that exist once go without a number."""
    return f"{role}-{rank}" if role in ("worker", "api") else role


class ChildProcess:
    """One child. Its output goes on to our stderr as it comes, so that progress bars stay what they are."""

    def __init__(
        self,
        role: str,
        rank: int,
        epoch: int,
        config: EngineConfig,
        death_fd: int,
        spans_fd: int | None = None,
        listen_fd: int | None = None,
    ) -> None:
        self.role = role
        self.rank = rank
        self.epoch = epoch
        self.spans_fd = spans_fd
        self.listen_fd = listen_fd
        self.started_s = time.monotonic()
        self.is_ready = False
        self.failure: str | None = None  # what it said of itself before it died
        config_fd = memory_file(msgspec.json.encode(config))
        arguments = [
            "--rank",
            rank,
            "--epoch",
            epoch,
            "--config-fd",
            config_fd,
            "--death-fd",
            death_fd,
            "--parent",
            os.getpid(),
        ]
        inherited = [config_fd, death_fd]
        for flag, fd in (("--spans-fd", spans_fd), ("--listen-fd", listen_fd)):
            if fd is not None:
                arguments += [flag, fd]
                inherited.append(fd)
        if sys.stderr.isatty():
            arguments.append("--progress")
        has_gpu = role == "worker" and config.worker.device == "cuda"
        placement = place_worker(rank, os.environ) if has_gpu else Placement({}, frozenset())
        # -P: the working directory must not shadow modules. A session of its own: Ctrl-C reaches the supervisor alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"procengine.procs.{role}", *map(str, arguments)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(role) | placement.environment,
        )
        with contextlib.suppress(OSError):  # it may be dead already, which others notice
            if cpus := placement.cpus & os.sched_getaffinity(0):
                os.sched_setaffinity(self._process.pid, cpus)
        os.close(config_fd)
        assert self._process.stdout is not None
        self.log_fd = self._process.stdout.fileno()
        os.set_blocking(self.log_fd, False)
        self.pidfd = os.pidfd_open(self._process.pid)
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._partial_line = ""

    @property
    def name(self) -> str:
        """`worker-0`; roles that exist once go without a number."""
        return child_name(self.role, self.rank)

    @property
    def identity(self) -> bytes:
        """Routing id of its control socket."""
        return f"{self.role}-{self.rank}".encode()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs; reaps it if it does not."""
        return self._process.poll() is None

    @property
    def gave_up(self) -> bool:
        """Whether it has ended by itself, with an error."""
        return not self.is_alive and self._process.returncode > 0

    @property
    def has_ended_well(self) -> bool:
        """Whether it has ended by itself, as it was asked to."""
        return not self.is_alive and self._process.returncode == 0

    def forward_log(self) -> bool:
        """Pass on what the child wrote. False: it closed its end."""
        try:
            data = os.read(self.log_fd, 65536)
        except BlockingIOError:
            return True
        if not data:
            return False
        write_log(text := data.decode(errors="replace"))
        *lines, self._partial_line = (self._partial_line + text).replace("\r", "\n").split("\n")
        self._last_lines.extend(line for line in lines if line.strip())
        return True

    def describe_end(self) -> str:
        """How it ended, in one line; then the last lines it wrote."""
        while self.is_alive is False and self._has_more_log():
            pass
        status = self._process.returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        reason = f"{self.name} (pid {self.pid}) {how}" + (f": {self.failure}" if self.failure else "")
        last = list(self._last_lines) + ([self._partial_line] if self._partial_line else [])
        return reason + ("\nits last log lines:\n  " + "\n  ".join(last) if last else "")

    def close(self) -> None:
        """Give up the descriptors of a process that has ended."""
        os.close(self.pidfd)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def dump_stacks(self) -> None:
        """Have it write to its log where its threads are."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(DUMP_SIGNAL)

    def kill(self) -> None:
        """End it now."""
        if self.is_alive:
            self._process.kill()
            self._process.wait()

    def _has_more_log(self) -> bool:
        before = (len(self._last_lines), self._partial_line)
        return self.forward_log() and before != (len(self._last_lines), self._partial_line)


def write_log(text: str) -> None:
    """To our stderr; if nobody reads that any more, or its disk is full, the group goes on without a log."""
    write_to(_STDERR, text)


def write_to(fd: int, text: str) -> bool:
    """Write all of it now: what a buffer kept would be lost, or an error at the exit. False: not possible."""
    data = text.encode(errors="replace")
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True


def _environment(role: str) -> dict[str, str]:
    """Ours, and for a worker a short spin of idle OpenMP threads.

    By default they spin until the next parallel region, which takes the cores away from the other processes of the
    group (and costs 2-10 times the step when there are no more cores than threads); sleeping at once costs a wake-up a
    region. What the user set stays.
    """
    return {"GOMP_SPINCOUNT": "20000", **os.environ} if role == "worker" else dict(os.environ)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process, 0 if it is gone (proc(5), statm)."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def peak_rss_bytes(pid: int) -> int:
    """The most resident memory that a process ever had, 0 if it is gone (proc(5), status: VmHWM)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, 0 if it is gone (proc(5), stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
