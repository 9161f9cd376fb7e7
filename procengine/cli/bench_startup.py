"""`procengine bench startup MODEL`: how long a group takes to be ready.

Owns: the options. Never does: measure (`bench.startup`).
"""

from __future__ import annotations

import argparse
import os
import sys

import msgspec

from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.cli.examples import add_examples
from procengine.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser, _mode: str) -> None:
    """Declare the mode's arguments."""
    parser.description = "Launch a private group several times; say how long each phase takes, and what it holds then."
    add_examples(
        parser,
        ("procengine bench startup smollm2-135m --runs 3", "three launches after one that does not count"),
        ("procengine bench startup smollm2-135m --device mock --json", "what starts beside the model"),
    )
    add_engine_arguments(parser)
    add = parser.add_argument_group("benchmark options").add_argument
    add("--runs", type=int, default=5, metavar="N", help="launches that count [5]")
    add("--warmup", type=int, default=1, metavar="N", help="launches before them: model files come into memory [1]")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from procengine.bench.startup import measure_startup, table
    from procengine.resolve import resolve

    for name, low in (("runs", 1), ("warmup", 0)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name}: must be at least {low}, got {getattr(args, name)}")
    config = resolve(engine_args_from(args, default_name=f"bench-{os.getpid()}"))
    figures = {"mode": "startup", **measure_startup(config, args.runs, args.warmup, _say)}
    figures["config"] = msgspec.to_builtins(config)
    print(msgspec.json.encode(figures).decode() if args.json else table(figures))
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
