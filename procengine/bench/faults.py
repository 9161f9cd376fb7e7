"""What it costs when a process dies: until it is noticed, until the streams move again, until the group is gone.

Owns: the experiments and what is wanted of them. Never does: look inside a process: all is seen from outside.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from procengine.bench.fault_streams import Streams
from procengine.bench.report import summary
from procengine.config import EngineConfig
from procengine.engine_args import EngineArgs
from procengine.errors import ProcengineError
from procengine.groups import GroupInfo, find_group
from procengine.launch import launch_group
from procengine.resolve import resolve

__all__ = ["FIGURES", "Wanted", "measure_faults", "missed", "table"]


class Wanted(NamedTuple):
    """What a figure means, and the most it may be, in milliseconds; None: it is only shown."""

    most_ms: float | None
    meaning: str


FIGURES: Final[Mapping[str, Wanted]] = {
    "worker_noticed": Wanted(100, "SIGKILL of a worker, until the supervisor has said so"),
    "survivor_serves": Wanted(300, "the same, until all streams move again on a second worker"),
    "restart_in_place": Wanted(None, "SIGKILL of the only worker, a mock one, until all streams move again"),
    "model_restart": Wanted(3000, "SIGKILL of the only worker, with the model, until all streams move again"),
    "output_restart": Wanted(None, "SIGKILL of the output process, until all streams move again"),
    "supervisor_killed": Wanted(1000, "SIGKILL of the supervisor, until no process is left"),
    "sigterm_idle": Wanted(1000, "SIGTERM of an idle group, until no process is left"),
}
_MOCK_STREAMS: Final = 16
_MODEL_STREAMS: Final = 4
_MAX_TOKENS: Final = 1000
_STEP_MS: Final = 5.0
_WAIT_S: Final = 60.0
_names = itertools.count()


def measure_faults(args: EngineArgs, num_runs: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """All figures, each from `num_runs` deaths. The mock device stands for the model where that plays no part; if
    `args` ask for it everywhere, `model_restart` is left out."""
    mock = msgspec.structs.replace(args, device="mock", mock_step_ms=args.mock_step_ms or _STEP_MS)
    samples: dict[str, list[float]] = {}
    samples["worker_noticed"], samples["survivor_serves"] = _kill_again_and_again(mock, 2, "worker-0", num_runs)
    progress("a worker of two: done")
    _, samples["restart_in_place"] = _kill_again_and_again(mock, 1, "worker-0", num_runs)
    progress("the only worker: done")
    if args.device != "mock":
        _, samples["model_restart"] = _kill_again_and_again(args, 1, "worker-0", num_runs)
        progress("the only worker, with the model: done")
    _, samples["output_restart"] = _kill_again_and_again(mock, 1, "output", num_runs)
    progress("the output process: done")
    samples["supervisor_killed"] = [_end_group(mock, signal.SIGKILL) for _ in range(num_runs)]
    samples["sigterm_idle"] = [_end_group(mock, signal.SIGTERM) for _ in range(num_runs)]
    figures = {f"{name}_ms": summary(np.array(samples[name]), (0, 100)) for name in FIGURES if name in samples}
    return {"num_runs": num_runs, **figures}


def missed(figures: Mapping[str, Any]) -> list[str]:
    """The figures whose median is above what is wanted."""
    shown = ((name, wanted.most_ms, figures.get(f"{name}_ms")) for name, wanted in FIGURES.items())
    return [name for name, most_ms, found in shown if found and most_ms is not None and found["p50"] > most_ms]


def table(figures: Mapping[str, Any]) -> str:
    """A line a figure."""
    lines = [f"{figures['num_runs']} runs; milliseconds", "", f"{'':<18} {'median':>8} {'worst':>8} {'wanted':>8}"]
    late = missed(figures)
    for name, wanted in FIGURES.items():
        found = figures.get(f"{name}_ms")
        if found:
            most = "" if wanted.most_ms is None else f"{wanted.most_ms:.0f}"
            mark = "MISSED: " if name in late else ""
            lines.append(f"{name:<18} {found['p50']:8.1f} {found['max']:8.1f} {most:>8}  {mark}{wanted.meaning}")
    return "\n".join(lines)


# --- deaths that the group survives


def _kill_again_and_again(
    args: EngineArgs, num_workers: int, victim: str, num_runs: int
) -> tuple[list[float], list[float]]:
    """Milliseconds until each death was noticed, and until the streams that it hit moved again."""
    noticed_ms, moved_ms = [], []
    num_streams = _MOCK_STREAMS if args.device == "mock" else _MODEL_STREAMS
    with _running(args, workers=num_workers) as (group, log):
        for _ in range(num_runs):
            with Streams(group, num_streams, _MAX_TOKENS) as streams:
                streams.wait_messages(10, _WAIT_S)
                pid = find_group(group.name).pids[victim]
                killed_ns = time.monotonic_ns()
                os.kill(pid, signal.SIGKILL)
                moved_ms.append(streams.wait_moved(killed_ns, _WAIT_S))
            noticed_ms.append((log.wait_for(f"(pid {pid}) was killed by SIGKILL", _WAIT_S) - killed_ns) / 1e6)
            _wait_successor(group, victim, pid)
    return noticed_ms, moved_ms


def _wait_successor(group: GroupInfo, victim: str, pid: int) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while find_group(group.name).pids[victim] == pid:
        if time.monotonic() > deadline_s:
            raise ProcengineError(f"{victim} was not restarted within {_WAIT_S:g} s")
        time.sleep(0.01)


# --- ends


def _end_group(args: EngineArgs, number: signal.Signals) -> float:
    """Milliseconds from a signal to the supervisor until all processes are gone."""
    with _running(args, workers=1) as (group, _):
        poller = select.poll()
        pidfds = [os.pidfd_open(pid) for pid in group.pids.values()]
        for pidfd in pidfds:
            poller.register(pidfd, select.POLLIN)
        sent_ns = time.monotonic_ns()
        os.kill(group.pids["supervisor"], number)
        num_left = len(pidfds)
        while num_left:
            ended = poller.poll(1e3 * _WAIT_S)
            if not ended:
                raise ProcengineError(f"{num_left} processes were left {_WAIT_S:g} s after {number.name}")
            for pidfd, _event in ended:
                poller.unregister(pidfd)
            num_left -= len(ended)
        gone_ns = time.monotonic_ns()
        for pidfd in pidfds:
            os.close(pidfd)
    return (gone_ns - sent_ns) / 1e6


# --- groups


class _Log:
    """A group's log: when what was said."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._condition = threading.Condition()
        self._pieces: list[tuple[int, str]] = []
        self._thread = threading.Thread(target=self._read, name="log", daemon=True)
        self._thread.start()

    def wait_for(self, text: str, timeout_s: float) -> int:
        """When the piece came that holds this text (CLOCK_MONOTONIC, ns)."""

        def find() -> int | None:
            return next((at_ns for at_ns, piece in self._pieces if text in piece), None)

        with self._condition:
            at_ns = self._condition.wait_for(find, timeout_s)
        if at_ns is None:
            raise ProcengineError(f"the group's log does not say {text!r} within {timeout_s:g} s")
        return at_ns

    def close(self) -> None:
        """Read to the end: nobody writes any more."""
        self._thread.join()
        os.close(self._fd)

    def _read(self) -> None:
        while data := os.read(self._fd, 1 << 16):
            with self._condition:
                self._pieces.append((time.monotonic_ns(), data.decode(errors="replace")))
                self._condition.notify_all()


@contextmanager
def _running(args: EngineArgs, workers: int) -> Iterator[tuple[GroupInfo, _Log]]:
    """A group in which deaths do not add up: each restart is the first one."""
    reader, writer = os.pipe()
    log = _Log(reader)
    try:
        with launch_group(_config(args, workers), log_to=writer) as group:
            yield find_group(group.endpoint), log
    finally:
        os.close(writer)
        log.close()


def _config(args: EngineArgs, workers: int) -> EngineConfig:
    name = f"{args.name or 'faults'}-{os.getpid()}-{next(_names)}"
    return resolve(msgspec.structs.replace(args, name=name, workers=workers, max_restarts=1 << 16, restart_window=0.1))
