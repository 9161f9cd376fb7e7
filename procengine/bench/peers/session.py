"""Engines by turns: all are loaded, one runs at a time, and one that fails drops out.

Owns: the order of runs, and who is stopped meanwhile. Never does: know an engine, or compare figures (`comparison`).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from procengine.bench.peers.answers import EngineError, figures_of
from procengine.bench.peers.loads import Load, PromptSource, Workload, make_load, warmup_load
from procengine.bench.peers.other_load import OtherLoad
from procengine.bench.peers.process import EngineProcess
from procengine.bench.peers.results import OTHERS, EngineResult, EngineSpec

__all__ = ["Limits", "run_order", "run_session"]

_MAX_IDLE_SHARE: Final = 0.05  # cores
_WATCH_S: Final = 0.3
_NOT_A_NAME: Final = re.compile(r"[^\w.-]+")  # options are part of a name, and may hold paths


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds.

    Attributes:
        start_s: until an engine is ready.
        run_s: for one run of one engine.
        idle_s: how long an engine is watched, after it has warmed up, for what it uses when it has nothing to do.
        settle_s: between two runs, for threads that spin a while after their work.
        max_others: cores that others may use: a run waits for it, for `quiet_wait_s` at most; None: it does not wait.
    """

    start_s: float = 600.0
    run_s: float = 900.0
    idle_s: float = 1.0
    settle_s: float = 0.3
    max_others: float | None = None
    quiet_wait_s: float = 30.0


def run_order(names: Sequence[str], number: int) -> list[str]:
    """ABC, CBA, ABC, ...: a machine that slowly gets faster or slower favours nobody."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def run_session(
    specs: Sequence[EngineSpec],
    workloads: Sequence[Workload],
    run_numbers: Sequence[int],
    source: PromptSource,
    logs: Path,
    limits: Limits,
    progress: Callable[[str], None],
) -> list[EngineResult]:
    """Load all engines, then one run of each work load for each number, by turns, on prompts that are new in each run.

    An interrupt (Ctrl-C) ends the runs; what was measured until then counts.
    """
    with _started(specs, source, logs, limits, progress) as seats:
        try:
            for number in run_numbers:
                for workload in workloads:
                    _take_turns(seats, workload, number, make_load(workload, source, seed=number), limits, progress)
        except KeyboardInterrupt:
            progress("interrupted: what was measured until now counts")
        for seat in seats:
            seat.note_memory()
    return [seat.result for seat in seats]


def _take_turns(
    seats: Sequence[_Seat],
    workload: Workload,
    number: int,
    load: Load,
    limits: Limits,
    progress: Callable[[str], None],
) -> None:
    for seat in _in_order(seats, number):
        figures = seat.run(workload, load, limits)
        seat.result.runs_by_workload.setdefault(workload.name, []).append(figures)
        progress(f"run {number + 1}, {workload.name}, {seat.describe(workload, figures)}")


class _Seat:
    """An engine of the session, and what is known of it. The process is None before it starts and after it failed."""

    def __init__(self, spec: EngineSpec) -> None:
        self.result = EngineResult(spec)
        self.process: EngineProcess | None = None

    def start(self, warmup: Mapping[bool, Load], logs: Path, limits: Limits) -> None:
        """Load it, warm it up, and see whether it leaves the cores alone when it has nothing to do."""
        begin_s = time.perf_counter()
        self.process = process = EngineProcess(
            self.result.spec, logs / f"{_NOT_A_NAME.sub('_', self.result.spec.name)}.log"
        )
        with self._dropping_out():
            ready = process.wait_ready(limits.start_s)
            self.result.ready_s = time.perf_counter() - begin_s
            self.result.version, self.result.precision = ready.version, ready.precision
            for load in warmup.values():
                figures_of(load, process.run(load, limits.run_s))  # for its checks
            time.sleep(limits.settle_s)
            self.result.idle_share = process.busy_share(limits.idle_s)
            self.result.is_stopped_when_idle = self.result.idle_share > _MAX_IDLE_SHARE
            self._leave_cores(limits)

    def run(self, workload: Workload, load: Load, limits: Limits) -> dict[str, Any] | None:
        """Figures of one run; None if it cannot run this, or has failed."""
        if self.process is None or workload.name not in self.result.spec.workloads:
            return None
        with self._dropping_out():
            self._wait_for_quiet(limits)
            others = OtherLoad(self.process.cpu_s)
            figures = figures_of(load, self.process.run(load, limits.run_s))
            figures[OTHERS] = others.cores()
            self._leave_cores(limits)
            return figures
        return None

    def describe(self, workload: Workload, figures: Mapping[str, Any] | None) -> str:
        """One run for people."""
        name = self.result.spec.name
        if figures is None:
            return f"{name}: {'-' if self.result.error is None else self.result.error.splitlines()[0]}"
        return (
            f"{name}: {figures['wall_s']:.2f} s, {figures['output_tokens_per_s']:.1f} output tok/s, "
            f"others used {figures[OTHERS]:.2f} cores"
        )

    def note_memory(self) -> None:
        """Before it ends."""
        if self.process is not None:
            self.result.peak_rss_mib = self.process.peak_rss_mib()

    def close(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.close()

    def _wait_for_quiet(self, limits: Limits) -> None:
        assert self.process is not None
        deadline_s = time.monotonic() + limits.quiet_wait_s
        while limits.max_others is not None and time.monotonic() < deadline_s:
            others = OtherLoad(self.process.cpu_s)
            time.sleep(_WATCH_S)
            if others.cores() <= limits.max_others:
                break

    def _leave_cores(self, limits: Limits) -> None:
        assert self.process is not None
        if self.result.is_stopped_when_idle:
            self.process.pause()
        else:
            time.sleep(limits.settle_s)

    @contextlib.contextmanager
    def _dropping_out(self) -> Iterator[None]:
        """A failure is this engine's alone: it is noted, and the process ends now."""
        try:
            yield
        except EngineError as error:
            self.result.error = str(error)
            assert self.process is not None
            self.process.close(wait_s=0.0)
            self.process = None


@contextlib.contextmanager
def _started(
    specs: Sequence[EngineSpec], source: PromptSource, logs: Path, limits: Limits, progress: Callable[[str], None]
) -> Iterator[list[_Seat]]:
    seats = [_Seat(spec) for spec in specs]
    with contextlib.ExitStack() as exits:
        for seat in seats:
            exits.callback(seat.close)
            progress(f"loading {seat.result.spec.name} ...")
            warmup = {is_streaming: warmup_load(source, is_streaming=is_streaming) for is_streaming in (False, True)}
            seat.start(warmup, logs, limits)
            progress(_describe_start(seat.result))
        yield seats


def _describe_start(result: EngineResult) -> str:
    if result.error is not None:
        return f"{result.spec.name} failed: {result.error}"
    how = "stopped while others run" if result.is_stopped_when_idle else "left running"
    return (
        f"{result.spec.name} {result.version}, {result.precision}: ready in {result.ready_s:.1f} s, "
        f"{result.idle_share:.2f} cores when idle ({how})"
    )


def _in_order(seats: Sequence[_Seat], number: int) -> list[_Seat]:
    seat_by_name = {seat.result.spec.name: seat for seat in seats}
    return [seat_by_name[name] for name in run_order(list(seat_by_name), number)]
