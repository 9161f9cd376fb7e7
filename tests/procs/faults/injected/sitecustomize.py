"""Run by every Python process of a group under test, before anything else: faults that come from inside a process.

The product knows nothing of this. A process looks, at two points of its life ("start": it is about to say that it is
ready; "step": once for each piece of its work), for the file `$FAULTS_DIR/<role>.<point>`. If that is there, the
process that removes it does what it says: `raise`, `memory`, `exit`, or `slow SECONDS TIMES`. `$FAULTS_DEVICE` "model"
says that the workers have one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROLES = ("worker", "output", "frontend", "metrics", "supervisor")


def role_of(argv: list[str]) -> str | None:
    """What this process is, by its command line: a child, or the supervisor that `serve` is."""
    for role in _ROLES:
        if f"procengine.procs.{role}" in argv:
            return role
    return "supervisor" if "serve" in argv else None


class Point:
    """A place in a process where a fault may strike."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pause_s = 0.0
        self._num_pauses = 0

    def pass_by(self) -> None:
        """Suffer the fault that waits here, if one does."""
        with contextlib.suppress(FileNotFoundError):
            order = self._path.read_text().split()
            self._path.unlink()
            self._obey(*order)
        if self._num_pauses:
            self._num_pauses -= 1
            time.sleep(self._pause_s)

    def _obey(self, fault: str, *arguments: str) -> None:
        if fault == "raise":
            raise RuntimeError("an injected fault")
        if fault == "memory":
            raise MemoryError("an injected fault")
        if fault == "exit":
            os._exit(0)
        assert fault == "slow", fault
        self._pause_s, self._num_pauses = float(arguments[0]), int(arguments[1])


def passing_by(owner: Any, name: str, point: Point) -> None:
    """Have all calls of a method pass by that point first."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        point.pass_by()
        return method(*arguments, **named)

    setattr(owner, name, call)


def place_points(role: str, folder: Path) -> None:
    """Each role's two points, in whatever it does all day."""
    start, step = (Point(folder / f"{role}.{name}") for name in ("start", "step"))
    if role == "supervisor":
        from procengine.poll_loop import PollLoop
        from procengine.procs.supervisor import Supervisor

        passing_by(Supervisor, "_on_ready", start)
        passing_by(PollLoop, "run_once", step)
        return
    from procengine.child import Child

    passing_by(Child, "say_ready", start)
    if role == "worker":
        passing_by(_device(), "run", step)
    elif role == "output":
        from procengine.text_outputs import TextOutputs

        passing_by(TextOutputs, "take_result", step)
    elif role == "frontend":
        from procengine.engine import Engine

        passing_by(Engine, "apply", step)
    else:
        from procengine.profiling.group_totals import GroupTotals

        passing_by(GroupTotals, "add_tables", step)


def _device() -> type:
    if os.environ.get("FAULTS_DEVICE") == "model":
        from procengine.device import Device

        return Device
    from procengine.mock_runner import MockRunner

    return MockRunner


if (_role := role_of(sys.orig_argv)) is not None:
    place_points(_role, Path(os.environ["FAULTS_DIR"]))
