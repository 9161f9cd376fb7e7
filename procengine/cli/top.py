"""`procengine top [GROUP]`: a live view of one group in the terminal.

Owns: the terminal while it runs, and which group is shown: one that ends is waited for. Never does: draw (`top_view`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from procengine.cli.examples import add_examples
from procengine.errors import ConfigError, EngineDeadError, GroupNotFoundError
from procengine.groups import GroupInfo, find_group

if TYPE_CHECKING:
    from rich.console import RenderableType

    from procengine.profiling.group_frame import Frame
    from procengine.profiling.group_monitor import GroupMonitor

__all__ = ["add_arguments", "run"]

_ANSWER_WAIT_S: Final = 3.0
_NUM_HISTORY: Final = 200
_QUIT_KEYS: Final = frozenset(b"qQ\x04")  # with Ctrl-D, a mere byte here; Ctrl-C is a signal still


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Watch a running group: tokens per second, latencies, how busy its workers are and what they wait for, and\n"
        "every process. It reads memory that the group writes anyway. q or Ctrl-C quits.\n"
        "Where input or output is no terminal, it prints one frame."
    )
    add_examples(
        parser,
        ("procengine top", "until q or Ctrl-C"),
        ("procengine top prod --window 30", "figures of half a minute"),
        ("procengine top --json", "one frame, for programs"),
    )
    parser.add_argument("group", nargs="?", metavar="GROUP", help="name of the group [the only running one]")
    parser.add_argument("--interval", type=float, default=1.0, metavar="X", help="seconds between two frames [1.0]")
    parser.add_argument("--window", type=float, default=5.0, metavar="X", help="seconds that figures go back [5.0]")
    once = parser.add_mutually_exclusive_group()
    once.add_argument("--once", action="store_true", help="print one frame as plain text")
    once.add_argument("--json", action="store_true", help="print one frame as a JSON object")


def run(args: argparse.Namespace) -> int:
    """Show the group until the user quits; or once."""
    for name, low in (("interval", 0.1), ("window", 1.0)):
        if not low <= getattr(args, name) <= 3600:
            raise ConfigError(f"{name}: must be between {low:g} and 3600, got {getattr(args, name):g}")
    if args.once or args.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print_once(args)
    else:
        _Live(args).run()
    return 0


def _find(wanted: str | None) -> GroupInfo:
    group = find_group(wanted)
    if "supervisor" not in group.pids:
        raise GroupNotFoundError(
            f"group {group.name!r} does not run on this machine: its memory cannot be read from here"
        )
    return group


# --- one frame


def _print_once(args: argparse.Namespace) -> None:
    frame = _measure(args)
    if args.json:
        print(msgspec.json.encode(frame).decode())
        return
    from rich.console import Console

    from procengine.cli.top_view import draw

    console = Console(width=None if sys.stdout.isatty() else 100, no_color=True, highlight=False, force_terminal=False)
    console.print(draw(frame, (), console.width, is_live=False))


def _measure(args: argparse.Namespace) -> Frame:
    """One frame, after two looks at the processes: CPU shares need them."""
    from procengine.profiling.group_monitor import GroupMonitor

    monitor = GroupMonitor(_find(args.group), args.window)
    try:
        _await_status(monitor)
        time.sleep(args.interval)
        _await_status(monitor)
        monitor.read()
        return monitor.frame()
    except OSError as error:
        raise EngineDeadError(f"group {monitor.info.name!r} cannot be read: {error.strerror}") from error
    finally:
        monitor.close()


def _await_status(monitor: GroupMonitor) -> None:
    monitor.ask()
    if monitor.status_socket.poll(int(1e3 * _ANSWER_WAIT_S)):
        monitor.take_status()


# --- live


class _Live:
    """Frames one after the other, until a key ends it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._wanted: str | None = args.group
        self._interval_s: float = args.interval
        self._window_s: float = args.window
        self._monitor: GroupMonitor | None = None
        self._history: deque[float] = deque(maxlen=_NUM_HISTORY)
        self._was: str | None = None

    def run(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console()
        live = Live(console=console, screen=True, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), _raw_keys(), _resizes() as resized_fd, live:
            is_over = False
            while not is_over:
                live.update(self._picture(console.width), refresh=True)
                is_over = self._wait(resized_fd)
        if self._monitor is not None:
            self._monitor.close()

    def _picture(self, width: int) -> RenderableType:
        from procengine.cli.top_view import draw, draw_waiting

        try:
            frame = self._frame()
        except (GroupNotFoundError, OSError) as error:
            self._detach()
            return draw_waiting(str(error), self._was)
        if frame is None:
            return draw_waiting("the supervisor has not answered yet", self._was)
        self._history.append(frame.window.output_tokens)
        return draw(frame, self._history, width, is_live=True)

    def _frame(self) -> Frame | None:
        from procengine.profiling.group_monitor import GroupMonitor

        if self._monitor is None:
            self._monitor = GroupMonitor(_find(self._wanted), self._window_s)
            self._history.clear()
        monitor = self._monitor
        if monitor.is_gone:
            raise GroupNotFoundError("its supervisor is not running any more")
        monitor.ask()
        monitor.read()
        return monitor.frame() if monitor.has_status else None

    def _detach(self) -> None:
        if self._monitor is not None:
            self._was = self._wanted = self._monitor.info.name
            self._monitor.close()
            self._monitor = None

    def _wait(self, resized_fd: int) -> bool:
        """Until the next frame is due, or the terminal has another size. True: the user quits."""
        import zmq

        due_s = time.monotonic() + self._interval_s
        poller = zmq.Poller()
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        poller.register(resized_fd, zmq.POLLIN)
        if self._monitor is not None:
            poller.register(self._monitor.status_socket, zmq.POLLIN)
        while (left_s := due_s - time.monotonic()) > 0:
            ready = dict(poller.poll(int(1e3 * left_s) + 1))
            if sys.stdin.fileno() in ready:
                keys = os.read(sys.stdin.fileno(), 1024)
                if not keys or _QUIT_KEYS & set(keys):
                    return True
            if resized_fd in ready:
                os.read(resized_fd, 1024)
                return False
            if self._monitor is not None and self._monitor.status_socket in ready:
                is_first = not self._monitor.has_status
                self._monitor.take_status()
                if is_first:
                    return False
        return False


@contextlib.contextmanager
def _raw_keys() -> Iterator[None]:
    """Keys come at once, and without an echo."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizes() -> Iterator[int]:
    """A descriptor that becomes readable when the terminal's size changes."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    signal.set_wakeup_fd(writer)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGWINCH, before)
        os.close(reader)
        os.close(writer)
