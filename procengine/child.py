"""What every child process of a group does first and last: its identity, its link to the supervisor, its death.

Owns: the start-up arguments of children and the rule that nothing outlives the supervisor. Never does: a role's work.

A child dies with its supervisor in two ways: the kernel signals it when the parent dies (PR_SET_PDEATHSIG), and the
read end of the supervisor's death pipe becomes readable when the last write end is gone. The pipe also serves where
the signal is lost (the parent died before the call).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq

from procengine import ipc
from procengine.config import EngineConfig
from procengine.messages import Failed, Ready, encode
from procengine.paths import socket_path
from procengine.profiling.span_ring import SpanArena

__all__ = ["DUMP_SIGNAL", "Child", "run_child", "run_loop"]

DUMP_SIGNAL = signal.SIGUSR2  # a child writes the stacks of all its threads to its log
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Child:
    """Who this process is. `control` is its DEALER to the supervisor; use it from one thread."""

    role: str
    rank: int
    epoch: int  # how many of this role and rank there were before
    config: EngineConfig
    death_fd: int
    context: zmq.Context[zmq.Socket[bytes]]
    control: zmq.Socket[bytes]
    shows_progress: bool  # a terminal is watching
    spans: SpanArena
    listen_fd: int | None = None  # a TCP socket to serve

    def endpoint(self, name: str) -> str:
        """Address of the group's socket `name`."""
        return socket_path(Path(self.config.group.run_dir), name)

    def say_ready(self, facts: dict[str, int | float | str]) -> None:
        """Tell the supervisor that this process serves. From here on the garbage collector leaves its objects alone."""
        gc.collect()
        gc.freeze()
        self.control.send(encode(Ready(self.role, self.rank, os.getpid(), facts)))


def run_child(role: str, main: Callable[[Child], None]) -> None:
    """Set the process up, run `main`, report its failure. Exits the process.

    `main` flushes its own sockets before it returns; threads that still block on others end with the process.
    """
    child = _start(role)
    threading.excepthook = lambda failed: _fail(child, failed.exc_value)  # a process without one of its threads hangs
    try:
        main(child)
    except Exception as error:  # noqa: BLE001 - the top of a process: whatever it is, the supervisor must hear of it
        _fail(child, error)
    sys.stderr.flush()
    os._exit(0)


def run_loop(loop: asyncio.AbstractEventLoop, is_tolerable: Callable[[dict[str, Any]], bool] | None = None) -> None:
    """Run until the loop is stopped. An exception that a callback lets out stops it, and is raised here.

    Unless it `is_tolerable`, by the context that the loop gives: what a peer did to its own connection may be.

    asyncio would log it and go on; but it is one of our invariants that broke, and who waits would wait for ever.
    """
    failures: list[BaseException] = []

    def fail(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if is_tolerable is not None and is_tolerable(context):
            return
        failures.append(context.get("exception") or RuntimeError(context["message"]))
        loop.stop()

    loop.set_exception_handler(fail)
    loop.run_forever()
    if failures:
        raise failures[0]


def _fail(child: Child, error: BaseException | None) -> NoReturn:
    traceback.print_exception(error)
    text = "".join(traceback.format_exception(error))
    _report(child, Failed(child.role, child.rank, f"{type(error).__name__}: {error}", text))
    os._exit(1)


def _report(child: Child, message: Failed) -> None:
    """Over a socket of its own: another thread may be using `child.control`."""
    context = ipc.make_context()
    ipc.connect(context, zmq.DEALER, child.endpoint("control")).send(encode(message))
    context.destroy(linger=1000)


def _start(role: str) -> Child:
    parser = argparse.ArgumentParser(prog=f"procengine {role}")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--config-fd", type=int, required=True)
    parser.add_argument("--death-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--spans-fd", type=int)
    parser.add_argument("--listen-fd", type=int)
    parser.add_argument("--progress", action="store_true")
    args = parser.parse_args()
    _die_with_parent(args.parent)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)  # the supervisor wants to know where a process hangs
    # A terminal sends Ctrl-C to the whole group; the supervisor alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with os.fdopen(args.config_fd, "rb") as file:
        config = msgspec.json.decode(file.read(), type=EngineConfig)
    context = ipc.make_context()
    endpoint = socket_path(Path(config.group.run_dir), "control")
    control = ipc.connect(context, zmq.DEALER, endpoint, identity=f"{role}-{args.rank}".encode())
    spans = SpanArena(args.spans_fd)
    return Child(
        role, args.rank, args.epoch, config, args.death_fd, context, control, args.progress, spans, args.listen_fd
    )


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
