"""`procengine bench depth MODEL`: what planning ahead of the device gains, by batch size.

Owns: the options. Never does: measure (`bench.depth`).
"""

from __future__ import annotations

import argparse
import copy
import os
import shlex
import sys
from typing import Final

import msgspec

from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.cli.examples import add_examples
from procengine.config import EngineConfig
from procengine.errors import ConfigError

__all__ = ["add_arguments", "run"]

_BATCH_SIZES: Final = "1,8,32,64"
_VARIANTS: Final = ("--async-depth 1", "--async-depth 2", "--async-depth 2 --decode-steps 4")


def add_arguments(parser: argparse.ArgumentParser, _mode: str) -> None:
    """Declare the mode's arguments."""
    parser.description = (
        "Groups that differ in how far they plan ahead decode the same batches by turns. For each batch size:\n"
        "tokens a second of the worker while every request decodes, their ratio to the first variant, run by run, and\n"
        "the share of its time in which the worker had nothing to run, with what it waited for."
    )
    add_examples(
        parser,
        ("procengine bench depth smollm2-135m --batch-sizes 1,8", "depth 1, depth 2, several steps a message"),
        ('procengine bench depth m --device mock --mock-step-ms 5 --variant "--async-depth 3"', "a variant of yours"),
    )
    add_engine_arguments(parser)
    add = parser.add_argument_group("benchmark options").add_argument
    add("--batch-sizes", default=_BATCH_SIZES, metavar="LIST", help=f"requests at once [{_BATCH_SIZES}]")
    add("--variant", action="append", metavar="OPTIONS", help=f"each use is one more [{'; '.join(_VARIANTS)}]")
    add("--input-len", type=int, default=32, metavar="N", help="tokens of each prompt [32]")
    add("--output-len", type=int, default=96, metavar="N", help="tokens of each answer [96]")
    add("--runs", type=int, default=5, metavar="N", help="of each variant and batch size [5]")
    add("--json", action="store_true", help="print one JSON object, with all figures of all runs")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from procengine.bench.depth import DepthPlan, compare_depths, measure_depths, table

    for name, low in (("input_len", 1), ("output_len", 16), ("runs", 1)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {low}, got {getattr(args, name)}")
    plan = DepthPlan(_batch_sizes(args), args.input_len, args.output_len, args.runs)
    variants = list(dict.fromkeys(args.variant or _VARIANTS))
    configs = {variant: _config(args, variant, number) for number, variant in enumerate(variants)}
    rows = compare_depths(measure_depths(configs, plan, lambda line: print(line, file=sys.stderr, flush=True)))
    print(msgspec.json.encode({"mode": "depth", "rows": rows}).decode() if args.json else table(rows))
    return 0


def _config(args: argparse.Namespace, variant: str, number: int) -> EngineConfig:
    """The common options, and on top of them those of a variant."""
    from procengine.resolve import resolve

    parser = argparse.ArgumentParser(prog="--variant")
    add_engine_arguments(parser)
    try:
        words = shlex.split(variant)
    except ValueError as error:
        raise ConfigError(f"--variant: {variant!r} cannot be read as options: {error}") from error
    own = parser.parse_args([args.model, *words], copy.copy(args))
    return resolve(engine_args_from(own, default_name=f"bench-{os.getpid()}-{number}"))


def _batch_sizes(args: argparse.Namespace) -> list[int]:
    try:
        sizes = [int(size) for size in args.batch_sizes.split(",")]
    except ValueError:
        raise ConfigError(
            f"--batch-sizes: must be whole numbers with commas between, got {args.batch_sizes!r}"
        ) from None
    max_num_seqs = engine_args_from(args).max_num_seqs
    for size in sizes:
        if not 1 <= size <= max_num_seqs:
            raise ConfigError(f"--batch-sizes: must be between 1 and max_num_seqs ({max_num_seqs}), got {size}")
    return sizes
