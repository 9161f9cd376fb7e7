"""`procengine bench MODE`: finds the mode and runs it.

Owns: the list of modes. Never does: measure (`procengine.bench`) or know a mode's options (`cli.bench_*`).
"""

from __future__ import annotations

import argparse
import importlib
from typing import Final, NamedTuple

from procengine.cli.examples import add_examples

__all__ = ["add_arguments", "run"]


class _Mode(NamedTuple):
    """A mode: `module` has `add_arguments(parser, mode)` and `run(args) -> int`."""

    module: str
    summary: str


_MODES: Final = {
    "throughput": _Mode("procengine.cli.bench_load_args", "all requests at once, to a private group"),
    "latency": _Mode("procengine.cli.bench_load_args", "one request after the other, to a private group"),
    "serve": _Mode("procengine.cli.bench_load_args", "requests that arrive over time, to a private or a running group"),
    "ipc": _Mode("procengine.cli.bench_ipc", "each stage of a step without a model, by batch size"),
    "depth": _Mode("procengine.cli.bench_depth", "what planning ahead of the device gains, by batch size"),
    "startup": _Mode("procengine.cli.bench_startup", "time until a group is ready, memory of its processes"),
    "faults": _Mode("procengine.cli.bench_faults", "what it costs when a process dies, and when a group ends"),
    "compare": _Mode("procengine.cli.bench_compare", "two configurations or source trees, run by turns"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Measure. docs/BENCHMARKING.md says what each figure means and how to get one that can be trusted."
    )
    add_examples(
        parser,
        ("procengine bench throughput smollm2-135m --num-prompts 16", "tokens a second, all at once"),
        ("procengine bench serve --request-rate 2 --num-prompts 20 --input-len 64", "a running group"),
        ("procengine bench ipc", "the pipeline without a model"),
        ("procengine bench throughput --help", "a mode's options"),
    )
    modes = parser.add_subparsers(dest="mode", metavar="MODE", required=True)
    for name, mode in _MODES.items():
        sub = modes.add_parser(
            name,
            help=mode.summary,
            description=mode.summary[0].upper() + mode.summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        importlib.import_module(mode.module).add_arguments(sub, name)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    return int(importlib.import_module(_MODES[args.mode].module).run(args))
