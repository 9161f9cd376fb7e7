"""`procengine restart PROCESS`: replaces one process of a running group, and no request notices.

Owns: the report. Never does: restart anything itself; the supervisor does.
"""

from __future__ import annotations

import argparse
import time

from procengine.cli.examples import add_examples
from procengine.errors import ConfigError, EngineDeadError, ProcengineError
from procengine.groups import find_group

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Replace a process of a running group by a new one, and lose nothing: a worker's requests go on with the other "
        "workers,\nor pause until the new one is there; clients reconnect to a new output process by themselves; the "
        "frontend first\nfinishes what runs, while new requests wait. It does not count as a death."
    )
    add_examples(
        parser,
        ("procengine restart worker-0", "its requests go on"),
        ("procengine restart frontend --group prod --timeout 60", "finish first what runs"),
    )
    parser.add_argument(
        "process", metavar="PROCESS", help="worker-0, worker-1, ..., output, frontend, metrics or api-0"
    )
    parser.add_argument("--group", metavar="GROUP", help="name or endpoint of the group [the only running one]")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="X",
        help="seconds for the frontend to finish what runs, or it stays as it is [the group's --drain-timeout]",
    )


def run(args: argparse.Namespace) -> int:
    """Ask for it, and wait until the new process is ready."""
    from procengine.control_link import ask_supervisor
    from procengine.messages import Restart, decode_restarted

    if args.timeout is not None and not args.timeout >= 0:
        raise ConfigError(f"timeout: must be 0 or more seconds, got {args.timeout}")
    group = find_group(args.group)
    started_s = time.monotonic()
    answer = ask_supervisor(group, Restart(args.process, args.timeout), None)
    if answer is None:
        raise EngineDeadError(f"group {group.name} has ended")
    restarted = decode_restarted(answer)
    if restarted.error is not None:
        raise ProcengineError(f"{args.process} of group {group.name} was not restarted: {restarted.error}")
    took_s = time.monotonic() - started_s
    print(f"{restarted.process} of group {group.name} is pid {restarted.pid} now, after {took_s:.1f} s")
    return 0
