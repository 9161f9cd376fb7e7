"""`procengine serve MODEL`: runs a group in the foreground, with this process as its supervisor.

Owns: nothing. Never does: print; the supervisor says when the group is ready.
"""

from __future__ import annotations

import argparse

from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.resolve import resolve

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Launch a process group and keep it running. One JSON line on stdout says when it is ready; the log is on "
        "stderr.\nCtrl-C or SIGTERM lets running requests finish (--drain-timeout); a second one ends it at once.\n\n"
        "With --port it answers OpenAI's HTTP API (docs/HTTP.md):\n  procengine serve smollm2-135m --port 8000"
    )
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the group until it ends."""
    config = resolve(engine_args_from(args))
    from procengine.procs.supervisor import run_group

    return run_group(config)
