"""`Recording`: reads a running group's spans, often enough that none is overwritten.

Owns: the clock, and what happens when the group ends meanwhile. Never does: disturb the group, or join anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from procengine.child_process import cpu_seconds
from procengine.errors import ConfigError, GroupNotFoundError
from procengine.groups import GroupInfo, find_group, is_gone
from procengine.profiling.capture import Capture, GroupFacts
from procengine.profiling.records import RecordKind
from procengine.profiling.snapshot import SpanReader, SpanTables

__all__ = ["READ_EVERY_S", "Recording", "record_for"]

READ_EVERY_S: Final = 0.25  # a ring of 16384 records takes more than a second at 5000 steps a second
# Of the time before the recording: which request a key is, and when it was admitted.
_FROM_BEFORE: Final = (RecordKind.REQUEST_ACCEPTED, RecordKind.REQUEST_ADMITTED)


class Recording:
    """Begins when it is made. Call `read` every `READ_EVERY_S` until it says no, or as long as you like."""

    def __init__(self, group: GroupInfo, *, includes_past: bool = False) -> None:
        """`includes_past`: begin with what the rings still hold.

        Raises:
            ConfigError: the group keeps no spans, is another user's, or runs on another machine.
            GroupNotFoundError: it has just ended.
        """
        if "supervisor" not in group.pids:
            raise ConfigError(
                f"group {group.name}: only a group on this machine can be read, and not before it is ready"
            )
        self._group = group
        self._reader = SpanReader(group.pids["supervisor"])
        self._includes_past = includes_past
        self._parts = [self._first_read()]
        self._began_ns = time.monotonic_ns()
        self._cpu = _CpuMeter(group.pids)
        self._restarted: dict[str, None] = {}
        self._cut_short = ""

    def _first_read(self) -> SpanTables:
        try:
            past = self._reader.read()
        except PermissionError as error:
            raise ConfigError(f"group {self._group.name}: it belongs to another user ({error})") from error
        except OSError as error:
            raise GroupNotFoundError(f"group {self._group.name} has just ended ({error})") from error
        if not self._reader.num_processes:
            raise ConfigError(f"group {self._group.name} keeps no spans: it was started with --span-records 0")
        self._open_since_ns = _open_since(past)
        return past if self._includes_past else _still_open(past)

    def read(self) -> bool:
        """Take in what is new. False: the group is gone, and nothing more will come."""
        if self._cut_short:
            return False
        try:
            self._parts.append(self._reader.read())
            is_over = is_gone(self._group)
        except OSError:
            is_over = True
        if is_over:
            self._parts.append(self._reader.read_last())
            self._cut_short = self._say_gone()
            return False
        self._look_for_restarts()
        self._cpu.read(self._group.pids)
        return True

    def _look_for_restarts(self) -> None:
        """A process of the group may have been replaced; the description says by whom."""
        try:
            now = find_group(self._group.endpoint)
        except GroupNotFoundError:
            return  # the next read finds out
        if now.pids != self._group.pids:
            for name, pid in now.pids.items():
                if self._group.pids.get(name) != pid:
                    self._restarted[name] = None
            self._group = now

    @property
    def num_ended(self) -> int:
        """Requests of which the end was read, those from before the recording left out."""
        return sum(len(part[RecordKind.REQUEST_DONE]) for part in self._parts[1:])

    def stop(self) -> Capture:
        """All that was read."""
        self.read()
        group = self._group
        return Capture(
            GroupFacts(group.name, group.model, dict(group.pids), group.num_blocks),
            self._began_ns,
            time.monotonic_ns(),
            self._parts[0].joined(*self._parts[1:]),
            self._cpu.seconds,
            self._cut_short,
            tuple(self._restarted),
            0 if self._includes_past else self._began_ns,
            self._open_since_ns,
        )

    def _say_gone(self) -> str:
        after_s = (time.monotonic_ns() - self._began_ns) / 1e9
        text = f"group {self._group.name} ended after {after_s:.1f} s; what it noted until then is shown"
        try:
            find_group(self._group.name)
        except GroupNotFoundError:
            return text
        return f"{text}. It was started anew: run the command again for the new one"


class _CpuMeter:
    """CPU seconds of a group's processes since it was made, those that are restarted included."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._first_s = {(name, pid): cpu_seconds(pid) for name, pid in pids.items()}
        self._last_s = dict(self._first_s)

    def read(self, pids: dict[str, int]) -> None:
        for name, pid in pids.items():
            self._last_s[name, pid] = max(cpu_seconds(pid), self._last_s.get((name, pid), 0.0))  # 0 if it is gone

    @property
    def seconds(self) -> dict[str, float]:
        """By process name."""
        total: dict[str, float] = {}
        for (name, pid), last_s in self._last_s.items():
            total[name] = total.get(name, 0.0) + last_s - self._first_s.get((name, pid), 0.0)
        return total


def _still_open(past: SpanTables) -> SpanTables:
    """Of what was written so far: acceptance and admission of requests of which no end is known."""
    ended = past[RecordKind.REQUEST_DONE]["key"]
    tables = SpanTables.of([]).tables
    for kind in _FROM_BEFORE:
        tables[kind] = past[kind].where(~np.isin(past[kind]["key"], ended))
    return SpanTables(tables)


def _open_since(past: SpanTables) -> int:
    """From when on every request's end is in the tables: the oldest record of the output process, if it is not the
    first that it ever wrote."""
    taken = past[RecordKind.RESULT_TAKEN]
    remembers_all = not len(taken) or (taken["key"] == 0).any()
    return 0 if remembers_all else int(taken["received_ns"].min())


def record_for(recording: Recording, seconds: float, sleep: Callable[[float], None] = time.sleep) -> Capture:
    """Read until `seconds` are over, the group is gone, or the user presses Ctrl-C, which keeps what there is."""
    deadline_s = time.monotonic() + seconds
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            sleep(min(READ_EVERY_S, left_s))
            if not recording.read():
                break
    except KeyboardInterrupt:
        pass
    return recording.stop()
