"""`CrashWriter`: the supervisor's side of crash records: it asks the frontend for its requests, reads the spans of all
processes (memory that the supervisor holds, so a dead one's too), and has a thread write the file.

Owns: what happens when the frontend does not answer, and when the disk is full. Never does: hold up the group.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
import zmq

import procengine
from procengine import ipc
from procengine.child_process import write_log
from procengine.children import Children
from procengine.config import EngineConfig
from procengine.crash.files import store_record
from procengine.crash.record import RECORD_VERSION, CrashRecord, RecordedRequest, StepTable
from procengine.messages import RecordedRequests, RecordWritten, TakeRecord, encode
from procengine.poll_loop import PollLoop, Timer
from procengine.profiling.records import COLUMNS, RecordKind
from procengine.profiling.snapshot import SpanReader

__all__ = ["CrashWriter"]

_WAIT_S: Final = 2.0  # for the frontend's part
_CLOSE_S: Final = 2.0
_ON_DEMAND: Final = "asked for"
_KINDS: Final = (
    RecordKind.STEP_SENT,
    RecordKind.STEP_RUN,
    RecordKind.RESULT_APPLIED,
    RecordKind.RESULT_TAKEN,
    RecordKind.REQUEST_ACCEPTED,
    RecordKind.REQUEST_ADMITTED,
    RecordKind.REQUEST_DONE,
)
_PACKAGES: Final = ("msgspec", "numpy", "pyzmq", "tokenizers", "torch")


@dataclass(slots=True)
class _Pending:
    """A record that waits for the frontend's part."""

    reasons: list[str]
    askers: list[bytes]
    timer: Timer


@dataclass(slots=True)
class _Written:
    """What a thread has done, for the loop to say."""

    path: Path | None
    error: str
    askers: list[bytes] = field(default_factory=list)


class CrashWriter:
    """One for a supervisor."""

    def __init__(self, config: EngineConfig, children: Children, control: zmq.Socket[bytes], loop: PollLoop) -> None:
        self._config = config
        self._children = children
        self._control = control
        self._loop = loop
        self._pending: _Pending | None = None
        self._record_id = 0
        self._threads: list[threading.Thread] = []
        self._written: list[_Written] = []
        self._is_written = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.watch(self._is_written, self._say_written)

    def on_death(self, end: str) -> None:
        """A process has died, so; those that must hear of it first have been told."""
        if self._config.crash.seconds:
            self._begin(end.split("\n", 1)[0], None)

    def on_demand(self, asker: bytes) -> None:
        """Somebody wants one, and where it is."""
        self._begin(_ON_DEMAND, asker)

    def take(self, message: RecordedRequests) -> None:
        """The frontend's part has come."""
        if self._pending is not None and message.record_id == self._record_id:
            self._write(message.data)

    def close(self) -> None:
        """The group ends: what is under way is finished, if that does not take long."""
        self._write(b"")
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._say_written()

    def _begin(self, reason: str, asker: bytes | None) -> None:
        askers = [] if asker is None else [asker]
        if self._pending is not None:  # several deaths at once are one event
            self._pending.reasons.append(reason)
            self._pending.askers += askers
            return
        self._record_id += 1
        timer = self._loop.call_at(time.monotonic() + _WAIT_S, lambda: self._write(b""))
        self._pending = _Pending([reason], askers, timer)
        frontend = self._children.find("frontend")
        if frontend is not None and frontend.is_alive and frontend.is_ready:
            self._children.send_to(frontend, TakeRecord(self._record_id))
        else:
            self._write(b"")  # its requests are gone with it

    def _write(self, requests: bytes) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.timer.cancel()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._write_file, args=(pending, requests), name="crash", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _write_file(self, pending: _Pending, requests: bytes) -> None:
        """In a thread: a disk may take its time."""
        crash, now = self._config.crash, datetime.now().astimezone()
        name = f"{self._config.group.name}-{now:%Y%m%d-%H%M%S}-{os.getpid()}-{time.monotonic_ns() % 10**6:06}"
        data = msgspec.msgpack.encode(self._record("; ".join(pending.reasons), now.isoformat(), requests))
        path, error = store_record(Path(crash.dir), name, data, crash.max_records)
        self._written.append(_Written(path, error, pending.askers))
        os.eventfd_write(self._is_written, 1)

    def _record(self, reason: str, written_at: str, requests: bytes) -> CrashRecord:
        seconds, now_ns = self._config.crash.seconds, time.monotonic_ns()
        return CrashRecord(
            version=RECORD_VERSION,
            reason=reason,
            written_at=written_at,
            written_ns=now_ns,
            seconds=seconds,
            is_redacted=self._config.crash.redact_prompts,
            versions=_versions(),
            config=msgspec.to_builtins(self._config),
            requests=msgspec.msgpack.decode(requests, type=list[RecordedRequest]) if requests else [],
            steps=_steps(now_ns - int(seconds * 1e9)),
        )

    def _say_written(self) -> None:
        try:
            os.eventfd_read(self._is_written)
        except BlockingIOError:
            return
        written, self._written = self._written, []
        for one in written:
            what = f"crash record: {one.path}" if one.path else f"no crash record could be written: {one.error}"
            if not one.askers or one.path is None:
                write_log(f"procengine: {what}\n")
            for asker in one.askers:
                ipc.send_routed(self._control, asker, encode(RecordWritten(str(one.path or ""), one.error)))


def _steps(since_ns: int) -> dict[str, StepTable]:
    """What all rings of this process's children hold from that moment on."""
    try:
        tables = SpanReader(os.getpid()).read().since(since_ns)
    except OSError:
        return {}
    return {
        kind.name.lower(): StepTable(["key", *COLUMNS[kind]], tables[kind].rows.astype("<i8").tobytes())
        for kind in _KINDS
    }


def _versions() -> dict[str, str]:
    found = {"procengine": procengine.__version__, "python": platform.python_version()}
    found |= {"libzmq": zmq.zmq_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
