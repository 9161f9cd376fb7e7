"""`Succession`: a process of a group has ended, and the group goes on: who hears of it, and when its successor starts.

Owns: the pauses before successors start, and the time that they have to become ready. Never does: count deaths
(`restarts` does), or end the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from procengine.child_process import ChildProcess, write_log
from procengine.children import Children
from procengine.crash.writer import CrashWriter
from procengine.poll_loop import PollLoop
from procengine.restarts import Restarts

__all__ = ["Succession"]

_OPTIONAL_ROLES = ("metrics",)  # a group goes on without them
_WHAT_GOES_ON = {
    "worker": "its requests go on",
    "output": "its requests go on",
    "frontend": "its requests are lost; clients send those again that have shown nothing",
    "metrics": "no request notices",
    "api": "its connections are cut, new ones wait",
}


class Succession:
    """Of one group.

    Args:
        watch: called with each successor, whose log and end are to be heard of.
        close_listener: called with a role that nobody fills any more.
    """

    def __init__(
        self,
        children: Children,
        restarts: Restarts,
        crashes: CrashWriter,
        loop: PollLoop,
        start_timeout_s: float,
        watch: Callable[[ChildProcess], None],
        close_listener: Callable[[str], None],
    ) -> None:
        self._children = children
        self._restarts = restarts
        self._crashes = crashes
        self._loop = loop
        self._start_timeout_s = start_timeout_s
        self._watch = watch
        self._close_listener = close_listener
        self._has_ended = False

    def succeed(self, child: ChildProcess) -> str | None:
        """It has ended. Returns how, if the group cannot go on: it has died too often."""
        if self._restarts.is_planned(child):
            self._lose(child, f"{child.name} (pid {child.pid}) has ended as it was asked to", 0.0)
            return None
        delay_s = self._restarts.delay_s(child, time.monotonic())
        is_optional = child.role in _OPTIONAL_ROLES
        end = self._restarts.describe_last(child) if delay_s is None else child.describe_end()
        if delay_s is not None:
            self._lose(child, end, delay_s)
        elif is_optional:
            write_log(f"procengine: {end}\nprocengine: the group goes on without {child.name}\n")
            self._close_listener(child.role)
        if not is_optional:
            self._crashes.on_death(end)
        return end if delay_s is None and not is_optional else None

    def end(self) -> None:
        """The group stops: nobody is started any more."""
        self._has_ended = True

    def _lose(self, child: ChildProcess, end: str, delay_s: float) -> None:
        write_log(f"procengine: {end}\nprocengine: {child.name} is restarted, {_WHAT_GOES_ON[child.role]}\n")
        self._restarts.tell_loss(child, end.split("\n", 1)[0])
        self._loop.call_at(time.monotonic() + delay_s, lambda: self._replace(child))

    def _replace(self, dead: ChildProcess) -> None:
        if self._has_ended:
            return
        self._loop.unwatch(dead.log_fd)
        child = self._children.replace(dead)
        self._watch(child)
        self._loop.call_at(child.started_s + self._start_timeout_s, lambda: self._kill_if_late(child))

    def _kill_if_late(self, child: ChildProcess) -> None:
        """A successor that hangs in its start is replaced like one that has died there."""
        if not child.is_ready and child.is_alive:
            late = f"{child.name} (pid {child.pid}) did not become ready within {self._start_timeout_s:g} s"
            write_log(f"procengine: {late}\n")
            child.kill()  # whoever watches its pidfd hears of it
