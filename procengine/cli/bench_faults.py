"""`procengine bench faults MODEL`: what the death of a process costs.

Owns: the options. Never does: measure (`bench.faults`).
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.cli.examples import add_examples
from procengine.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser, _mode: str) -> None:
    """Declare the mode's arguments."""
    parser.description = (
        "Kill processes of private groups again and again; say how long it took until that was noticed, until the\n"
        "streams moved again, or until nothing was left. The exit status is 1 if a median is above what is wanted."
    )
    add_examples(
        parser,
        ("procengine bench faults smollm2-135m --device mock", "the pipeline's own part"),
        ("procengine bench faults smollm2-135m --runs 2 --json", "with a model"),
    )
    add_engine_arguments(parser)
    add = parser.add_argument_group("benchmark options").add_argument
    add("--runs", type=int, default=5, metavar="N", help="deaths of each kind [5]")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from procengine.bench.faults import measure_faults, missed, table

    if args.runs < 1:
        raise ConfigError(f"--runs: must be at least 1, got {args.runs}")
    figures = {"mode": "faults", **measure_faults(engine_args_from(args), args.runs, _say)}
    print(msgspec.json.encode(figures).decode() if args.json else table(figures))
    return 1 if missed(figures) else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
