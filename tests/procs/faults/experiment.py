"""One cell of the fault matrix, run: a group, a load, the fault, and what must have come of it.

Owns: the course of an experiment by phase and outcome. Never does: decide what should come of a fault (`table`).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from procengine.client import Client
from procengine.errors import EngineDeadError, ProcengineError
from procengine.groups import find_group
from procengine.run_dir import sweep_stale_dirs
from procengine.sampling_params import SamplingParams
from tests.procs.faults.injection import SIGNALS, Injector, child_pid, stall
from tests.procs.faults.load import Asker, Load
from tests.procs.faults.table import Cell
from tests.procs.harness import Served, as_ids, num_open_fds, wait_until
from tests.procs.raw_client import RawClient

__all__ = ["START_TIMEOUT_S", "Experiment", "options_of"]

START_TIMEOUT_S: Final = 4.0  # where a start must fail by it
_STALL_S: Final = 0.5
_WAIT_S: Final = 40.0
_LATE_FDS: Final = 3  # connections that nothing has waited for, when they are counted first; a leak adds up over cells
_BASE: Final = ("--restart-window", 0.1, "--drain-timeout", 60, "--max-num-seqs", 64)
_OPTIONS: Final = {
    "prefill": ("--mock-step-ms", 20, "--max-num-batched-tokens", 64, "--step-timeout", 2),
    "multi-step": ("--mock-step-ms", 5, "--decode-steps", 4, "--async-depth", 3, "--step-timeout", 2),
}
_DECODE: Final = ("--mock-step-ms", 5, "--async-depth", 2, "--step-timeout", 2)


def options_of(cell: Cell) -> tuple[object, ...]:
    """How the group of a cell is started; equal ones may share a group."""
    own: list[object] = [*_BASE, *_OPTIONS.get(cell.phase, _DECODE)]
    if cell.role == "metrics":
        own += ["--metrics-port", 0]
    if cell.fault == "SIGSTOP" and cell.phase in ("starting", "restarting"):
        own += ["--start-timeout", START_TIMEOUT_S]
    return tuple(own)


class Experiment:
    """A group that suffers a fault. The group may have been through others before, and may go on to others."""

    def __init__(self, cell: Cell, group: Served, injector: Injector) -> None:
        self._cell = cell
        self._group = group
        self._injector = injector
        self._struck_s = 0.0
        self.recovery_s = 0.0

    def run(self) -> None:
        """All of it. The group is ready, unless the phase is its start."""
        if self._cell.phase == "starting":
            self._run_start()
        else:
            self._run_with_load()
        wait_until(self._has_struck, "the fault has struck")

    def _has_struck(self) -> bool:
        return not any(self._injector.is_armed(self._cell.role, point) for point in ("start", "step"))

    # --- while it starts

    def _run_start(self) -> None:
        cell, group = self._cell, self._group
        if cell.fault in SIGNALS:
            pid = group.pid if cell.role == "supervisor" else child_pid(group, cell.role)
            if cell.role == "supervisor":
                child_pid(group, "worker")
            self._strike(pid, None)
        if cell.fault == "stall":
            stall(group.pid, _STALL_S, None)
        if cell.outcome == "exact":
            group.wait_ready()
            with RawClient(group.endpoint) as raw:
                self._serves(raw)
        elif cell.outcome == "gone":
            self._expect_gone(None)
        else:
            event = group.next_event()
            assert event["event"] == "failed" and cell.role in event["error"], event
            assert group.finish(_WAIT_S) == 1
            self._expect_nothing_left()

    # --- while it serves

    def _run_with_load(self) -> None:
        group, cell = self._group, self._cell
        before = find_group(group.name).pids
        with RawClient(group.endpoint, drops_repeats=True) as raw:
            self._serves(raw)
            files = self._files()
            self._injector.first_fds = self._injector.first_fds or {
                name: num_open_fds(pid) for name, pid in before.items()
            }
            load = self._make_load(raw)
            counts = load.counts() if load else {}
            with Client(group.endpoint) as witness:
                asker = Asker(witness)
                if cell.outcome == "lost" and load is not None:
                    asker.start()
                if cell.phase == "draining":
                    self._begin_drain()
                self._hit(before, raw)
                if cell.outcome == "exact":
                    self._expect_exact(load or self._make_idle_load(raw), counts)
                elif cell.outcome == "lost":
                    self._expect_lost(asker, load)
                elif cell.outcome == "told":
                    self._expect_told(raw, witness, load)
                else:
                    self._expect_gone(witness)
            if cell.outcome in ("exact", "lost"):
                self._expect_alive(before, raw, files)

    def _hit(self, before: dict[str, int], raw: RawClient) -> None:
        cell, group = self._cell, self._group
        pid = before[self._process]
        if cell.phase == "restarting":
            if cell.fault not in SIGNALS:
                self._injector.arm(cell.role, "start", cell.fault)
            os.kill(pid, signal.SIGKILL)
            self._struck_s = time.monotonic()
            if cell.fault in SIGNALS:
                os.kill(child_pid(group, cell.role, set(before.values())), SIGNALS[cell.fault])
            return
        self._strike(pid, raw)
        if cell.fault == "stall":
            stall(pid, _STALL_S, raw)

    def _strike(self, pid: int, raw: RawClient | None) -> None:
        self._struck_s = time.monotonic()
        self._injector.strike(self._group, self._cell.role, pid, self._cell.fault, raw)

    def _make_load(self, raw: RawClient) -> Load | None:
        """Streams in the phase of the cell: none yet, prompts that are being computed, or tokens that come."""
        phase = self._cell.phase
        if phase == "idle":
            return None
        if phase == "prefill":
            load = Load(raw, self._name("p"), [as_ids(120 + at, at) for at in range(8)], max_tokens=20)
            first_step = raw.stats()["num_steps"]
            wait_until(lambda: raw.stats()["num_steps"] >= first_step + 3, "prompts are being computed")
            assert min(load.counts().values()) == 0
            return load
        num_tokens = 300 if phase == "draining" else 120  # there, the group is to last until the fault has struck
        load = Load(raw, self._name("d"), [as_ids(3 + at, at) for at in range(12)], max_tokens=num_tokens)
        load.wait_tokens(8)
        return load

    def _make_idle_load(self, raw: RawClient) -> Load:
        """What comes behind a fault that met nobody."""
        return Load(raw, self._name("i"), [as_ids(5 + at, at) for at in range(8)], max_tokens=60)

    def _serves(self, raw: RawClient) -> None:
        """A small load, undisturbed; afterwards everybody has everybody's connection."""
        Load(raw, self._name("s"), [as_ids(4 + at, at) for at in range(3)], max_tokens=4).expect_exact()

    def _name(self, prefix: str) -> str:
        return f"{self._cell} {prefix}{time.monotonic_ns()} "

    def _begin_drain(self) -> None:
        self._group.signal(signal.SIGTERM)
        with Client(self._group.endpoint) as client:

            def is_refused() -> bool:
                try:
                    client.generate([100], SamplingParams(max_tokens=1))
                except ProcengineError as error:
                    return "shutting down" in str(error)
                return False

            wait_until(is_refused, "the group drains", _WAIT_S)

    # --- outcomes

    def _expect_exact(self, load: Load, counts: dict[str, int]) -> None:
        load.wait_moved(counts or dict.fromkeys(load.names, 0))
        self.recovery_s = time.monotonic() - self._struck_s
        load.expect_exact()

    def _expect_lost(self, asker: Asker, load: Load | None) -> None:
        asker.start()
        asker.expect_exact()
        self.recovery_s = time.monotonic() - self._struck_s
        if load is not None:
            load.expect_ended_or_lost()

    def _expect_alive(self, before: dict[str, int], raw: RawClient, files: set[str]) -> None:
        cell, group = self._cell, self._group
        if cell.phase == "draining":
            assert group.finish(_WAIT_S) == 0
            self._expect_nothing_left()
            return
        self._wait_pids_settled(before)
        self._serves(raw)
        wait_until(lambda: not self._leaks(), lambda: f"descriptors as at first: {self._leaks()}", _WAIT_S)
        wait_until(lambda: self._files() == files, lambda: f"the same files: {self._files() ^ files}", _WAIT_S)

    def _wait_pids_settled(self, before: dict[str, int]) -> None:
        """A new process where one died, and no other process than those that the group knows."""
        cell, group = self._cell, self._group
        dies = cell.fault not in ("slow", "limit", "stall")
        if dies or cell.phase == "restarting":
            wait_until(lambda: find_group(group.name).pids[self._process] != before[self._process], "a successor", 40)

        def is_settled() -> bool:
            pids = find_group(group.name).pids
            others = {name: pid for name, pid in pids.items() if name != self._process}
            assert others == {name: pid for name, pid in before.items() if name != self._process}
            return self._injector.processes() == set(pids.values())

        wait_until(is_settled, lambda: f"no orphan: {self._injector.processes()}, {find_group(group.name).pids}", 40)
        if not dies and cell.fault != "limit" and cell.phase != "restarting":
            assert find_group(group.name).pids == before, "nobody was replaced"

    def _expect_told(self, raw: RawClient, witness: Client, load: Load | None) -> None:
        if load is not None:
            load.expect_told()
        with pytest.raises(EngineDeadError):
            self._ask_until_error(witness)
        self.recovery_s = time.monotonic() - self._struck_s
        assert self._group.finish(_WAIT_S) == 1
        assert self._process in self._group.log
        self._expect_nothing_left()

    def _expect_gone(self, witness: Client | None) -> None:
        wait_until(lambda: not self._injector.processes(), "all processes are gone", _WAIT_S)
        self.recovery_s = time.monotonic() - self._struck_s
        if witness is not None:
            with pytest.raises(EngineDeadError):
                self._ask_until_error(witness)
        self._group.finish(_WAIT_S)
        self._expect_nothing_left()

    @staticmethod
    def _ask_until_error(client: Client) -> None:
        deadline_s = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline_s:
            client.generate([100], SamplingParams(max_tokens=2))

    def _expect_nothing_left(self) -> None:
        """No process; no file, at the latest when the next group on this machine has looked."""
        wait_until(lambda: not self._injector.processes(), "no process is left", _WAIT_S)
        sweep_stale_dirs(self._run_dir.parent)
        assert not self._run_dir.exists()

    # --- what it holds

    @property
    def _process(self) -> str:
        return "worker-0" if self._cell.role == "worker" else self._cell.role

    @property
    def _run_dir(self) -> Path:
        return Path(os.environ["PROCENGINE_RUN_DIR"]) / str(self._group.name)

    def _files(self) -> set[str]:
        shared = {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()}
        return {path.name for path in self._run_dir.iterdir()} | {name for name in shared if "procengine" in name}

    def _leaks(self) -> dict[str, tuple[int, int]]:
        """Processes that hold more descriptors than before the first fault that this group has seen: (then, now)."""
        pids = find_group(self._group.name).pids
        counts = {name: (self._injector.first_fds[name], num_open_fds(pid)) for name, pid in pids.items()}
        return {name: (first, now) for name, (first, now) in counts.items() if now > first + _LATE_FDS}
