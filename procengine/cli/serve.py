"""`procengine serve MODEL`: runs a group in the foreground, with this process as its supervisor.

Owns: nothing. Never does: print on stdout; the supervisor says when the group is ready.
"""

from __future__ import annotations

import argparse
import os
import sys

from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.cli.examples import add_examples
from procengine.option_sources import unknown_variables

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Launch a process group and keep it running. One JSON line on stdout says when it is ready; the log is on "
        "stderr.\nCtrl-C or SIGTERM lets running requests finish (--drain-timeout); a second one ends it at once.\n\n"
        "Each option may also be set in the environment (PROCENGINE_PORT=8000) or in the file of --config; the command "
        "line wins\nover the environment, the environment over the file. `procengine config --effective` shows what "
        "holds, and why."
    )
    add_examples(
        parser,
        ("procengine serve smollm2-135m", "for clients of this machine: `procengine chat`, Client()"),
        ("procengine serve smollm2-135m --port 8000", "and OpenAI's HTTP API (docs/HTTP.md)"),
        ("procengine serve --config procengine.toml", "model and options from a file"),
        ("procengine serve smollm2-135m --device mock --mock-step-ms 10", "no model: to try clients out"),
        notes="docs/DEPLOYMENT.md: as a service, in a container, in Kubernetes.",
    )
    add_engine_arguments(parser, demands_model=False)


def run(args: argparse.Namespace) -> int:
    """Run the group until it ends."""
    for line in unknown_variables(os.environ):
        print(f"procengine: {line}", file=sys.stderr)
    engine_args = engine_args_from(args, environ=os.environ)
    # Here, not above: `procengine serve --help` need not load what runs a group.
    from procengine.procs.supervisor import run_group
    from procengine.resolve import resolve

    return run_group(resolve(engine_args))
