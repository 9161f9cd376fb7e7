"""`procengine bench compare ... MODE ...`: two configurations or source trees by turns.

Owns: the options, and which figures of a mode are compared by default. Never does: run (`bench.compare`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

import msgspec

from procengine.cli.examples import add_examples
from procengine.errors import ConfigError

__all__ = ["add_arguments", "run"]

_METRICS: Final = {
    "throughput": "output_tokens_per_s,ttft_ms.p50,tpot_ms.p50",
    "latency": "ttft_ms.p50,tpot_ms.p50",
    "serve": "output_tokens_per_s,ttft_ms.p50,ttft_ms.p99,tpot_ms.p50",
    "startup": "ready_s.p50",
    "ipc": "us.schedule.256.p50,us.build.256.p50,us.apply.256.p50,us.detokenize.256.p50,us.hop_step.256.p50",
}


def add_arguments(parser: argparse.ArgumentParser, _mode: str) -> None:
    """Declare the mode's arguments."""
    parser.description = (
        "Run one of the other modes for A and for B by turns (AB, BA, AB, ...) and print the ratios B/A of the pairs:\n"
        "median, range, and a 95 % bootstrap interval of the median. All that follows MODE goes to both sides.\n\n"
        "An option that is one word needs an equals sign: --b=--no-enable-prefix-caching"
    )
    add_examples(
        parser,
        ('procengine bench compare --a "--async-depth 1" --b "--async-depth 2" throughput smollm2-135m', "two options"),
        ("procengine bench compare --a-path ../before --b-path . throughput smollm2-135m --device mock", "two trees"),
    )
    add = parser.add_argument
    for side in ("a", "b"):
        add(f"--{side}", default="", metavar="OPTIONS", help=f"options of {side.upper()} alone, as one text")
    for side in ("a", "b"):
        add(f"--{side}-path", type=Path, metavar="DIR", help=f"source tree of {side.upper()} [the installed one]")
    add("--pairs", type=int, default=6, metavar="N", help="runs of each side [6]")
    add("--metrics", metavar="LIST", help="figures of the mode's JSON, dots between names [by mode, e.g. ttft_ms.p50]")
    add("--json", action="store_true", help="print one JSON object, with all figures of all runs")
    add("bench_mode", metavar="MODE", choices=tuple(_METRICS), help=", ".join(_METRICS))
    add("rest", metavar="...", nargs=argparse.REMAINDER, help="of MODE: arguments of both sides")


def run(args: argparse.Namespace) -> int:
    """Run and print."""
    from procengine.bench.compare import compare, make_side, table

    if args.pairs < 1:
        raise ConfigError(f"--pairs: must be at least 1, got {args.pairs}")
    metrics = [text.strip() for text in (args.metrics or _METRICS[args.bench_mode]).split(",") if text.strip()]
    if not metrics:
        raise ConfigError(f"--metrics: must name at least one figure, got {args.metrics!r}")
    sides = (make_side("A", args.a, args.a_path), make_side("B", args.b, args.b_path))
    if (sides[0].options, sides[0].path) == (sides[1].options, sides[1].path):
        print("A and B are the same: what is shown is the noise", file=sys.stderr)
    rest = [word for word in args.rest if word != "--json"]  # behind MODE too it can only mean us
    result = compare([args.bench_mode, *rest], sides, args.pairs, metrics, _say)
    print(msgspec.json.encode(result).decode() if args.json or rest != args.rest else table(result))
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
