"""`procengine health [GROUP]`: whether a group serves and gets on with it, for people and for service managers.

Owns: the exit status and the lines. Never does: judge (`procengine.health` does), or change anything.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

import msgspec

from procengine.cli.examples import add_examples
from procengine.groups import find_group

if TYPE_CHECKING:
    from procengine.health import GroupHealth

__all__ = ["add_arguments", "run"]

_WAIT_S: Final = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Say whether a group is live (it answers), ready (it takes requests) and progressing (no process is silent or "
        "stuck).\nThe exit status is 0 if it is all three, else 1. A worker is stuck when its steps have brought "
        "nothing for a\ntenth of --step-timeout."
    )
    add_examples(
        parser,
        ("procengine health", "the only running group"),
        ("procengine health prod --json", "for a service manager"),
    )
    parser.add_argument("group", nargs="?", metavar="GROUP", help="name of the group [the only running one]")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    """Ask, print, and say by the exit status how it is."""
    from procengine.control_link import ask_supervisor
    from procengine.health import group_health, health_object, silent_health
    from procengine.messages import GetStatus, decode_status

    group = find_group(args.group)
    answer = ask_supervisor(group, GetStatus(), _WAIT_S)
    status = None if answer is None else decode_status(answer)
    health = silent_health(_WAIT_S) if status is None else group_health(status)
    if args.json:
        print(msgspec.json.encode(health_object(group.name, health, status)).decode())
    else:
        print("\n".join(_lines(group.name, health)))
    return int(not health.is_healthy)


def _lines(name: str, health: GroupHealth) -> list[str]:
    said = [
        f"{'' if value else 'not '}{word}"
        for word, value in (("live", health.live), ("ready", health.ready), ("progressing", health.progressing))
    ]
    return [f"{name}: {', '.join(said)}", *(f"  {problem}" for problem in health.problems)]
