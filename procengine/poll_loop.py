"""`PollLoop`: a process asleep in one poll, and what wakes it: descriptors, sockets, signals, moments in time.

Owns: who is called for which of them. Never does: know what any of it means.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import zmq

__all__ = ["PollLoop", "Timer", "signals_as_descriptor"]


class Timer:
    """A call that is due at a moment of CLOCK_MONOTONIC, unless it is cancelled."""

    def __init__(self, at_s: float, call: Callable[[], None]) -> None:
        self.at_s = at_s
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        """Do not call. Too late is fine."""
        self.is_cancelled = True


class PollLoop:
    """One thread's. Handlers may watch, unwatch and set timers."""

    def __init__(self) -> None:
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._poller = zmq.Poller()
        self._timers: list[Timer] = []

    def watch(self, source: int | zmq.Socket[bytes], handler: Callable[[], None]) -> None:
        """Call `handler` whenever `source` can be read."""
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN if isinstance(source, zmq.Socket) else select.POLLIN)

    def unwatch(self, source: int) -> None:
        """Never mind; also one that is not watched."""
        if self._handlers.pop(source, None):
            self._poller.unregister(source)

    def call_at(self, at_s: float, call: Callable[[], None]) -> Timer:
        """Call once, at that moment or soon after."""
        timer = Timer(at_s, call)
        self._timers.append(timer)
        return timer

    def run_once(self) -> None:
        """Sleep until something happens, then call whom it concerns."""
        for source, _event in self._poller.poll(self._timeout_ms()):
            handler = self._handlers.get(source)  # it may have been unwatched by one before it
            if handler is not None:
                handler()
        now_s = time.monotonic()
        due = [timer for timer in self._timers if timer.at_s <= now_s]
        self._timers = [timer for timer in self._timers if timer.at_s > now_s and not timer.is_cancelled]
        for timer in due:
            if not timer.is_cancelled:
                timer.call()

    def _timeout_ms(self) -> int | None:
        moments = [timer.at_s for timer in self._timers if not timer.is_cancelled]
        return max(0, int(1e3 * (min(moments) - time.monotonic())) + 1) if moments else None


def signals_as_descriptor() -> int:
    """SIGTERM, SIGINT and SIGHUP make this descriptor readable."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, and means it
            signal.signal(number, lambda *_: None)
    return reader
