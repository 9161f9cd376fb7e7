"""`procengine drain GROUP`: ends a group when what it runs is finished.

Owns: the report. Never does: end anything itself; the supervisor does.
"""

from __future__ import annotations

import argparse
import sys
import time

from procengine.cli.examples import add_examples
from procengine.errors import ConfigError
from procengine.groups import find_group, is_gone

__all__ = ["add_arguments", "run"]

_LOOK_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "End a group as SIGTERM to its supervisor does: it takes no new requests, finishes those that run, and ends. "
        "Waits until\nit is gone, and says what became of the requests. The exit status is 1 if it ended by an error."
    )
    add_examples(
        parser,
        ("procengine drain prod", "wait as long as the group's --drain-timeout"),
        ("procengine drain prod --timeout 120", "or two minutes"),
    )
    parser.add_argument("group", metavar="GROUP", help="name of the group")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="X",
        help="seconds after which what still runs is aborted [what the group was started with]",
    )


def run(args: argparse.Namespace) -> int:
    """Ask for the end, and wait for it."""
    from procengine.control_link import ask_supervisor
    from procengine.messages import Ended, EndGroup, decode_ended

    if args.timeout is not None and not args.timeout >= 0:
        raise ConfigError(f"timeout: must be 0 or more seconds, got {args.timeout}")
    group = find_group(args.group)
    started_s = time.monotonic()
    answer = ask_supervisor(group, EndGroup(args.timeout), None)
    while group.run_dir and not is_gone(group):
        time.sleep(_LOOK_S)
    ended = Ended(0, 0, "it did not say how") if answer is None else decode_ended(answer)
    took_s = time.monotonic() - started_s
    counts = f"{ended.num_finished} requests finished, {ended.num_aborted} aborted"
    if ended.error is None:
        print(f"group {group.name} is gone after {took_s:.1f} s: {counts}")
        return 0
    print(f"procengine: error: group {group.name} is gone after {took_s:.1f} s: {ended.error}", file=sys.stderr)
    return 1
