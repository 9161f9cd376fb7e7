"""`procengine bench ipc`: what each stage of a step costs without a model.

Owns: the options. Never does: measure (`bench.ipc`).
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

import msgspec

from procengine.cli.examples import add_examples
from procengine.errors import ConfigError
from procengine.paths import procengine_home

__all__ = ["add_arguments", "run"]

_BATCH_SIZES: Final = "1,8,64,256,1024"
_MAX_BATCH_SIZE: Final = 65536  # of max_num_seqs


def add_arguments(parser: argparse.ArgumentParser, _mode: str) -> None:
    """Declare the mode's arguments."""
    parser.description = (
        "Run decode steps through the product's own code without a model: every stage timed on its own, and one hop\n"
        "between two processes over a real socket. MODEL only lends its tokenizer."
    )
    add_examples(
        parser,
        ("procengine bench ipc", "by batch size"),
        ("procengine bench ipc smollm2-135m --batch-sizes 256 --json", "one size, a real tokenizer"),
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="whose tokenizer to use [one of 256 single bytes]")
    add("--batch-sizes", default=_BATCH_SIZES, metavar="LIST", help=f"rows of a step [{_BATCH_SIZES}]")
    add("--num-steps", type=int, default=200, metavar="N", help="steps of each size [200]")
    add("--input-len", type=int, default=32, metavar="N", help="tokens of each prompt [32]")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from procengine.bench.ipc import measure_ipc, table
    from procengine.bench.stages import tiny_tokenizer
    from procengine.model_source import resolve_model
    from procengine.tokenizer import Tokenizer

    batch_sizes = _batch_sizes(args.batch_sizes)
    for name in ("num_steps", "input_len"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1, got {getattr(args, name)}")
    tokenizer = tiny_tokenizer()
    if args.model is not None:
        tokenizer = Tokenizer.load(resolve_model(args.model, procengine_home()).tokenizer_path)
    figures = measure_ipc(batch_sizes, args.num_steps, args.input_len, tokenizer, _say)
    figures = {"mode": "ipc", "tokenizer": args.model or "tiny", **figures}
    print(msgspec.json.encode(figures).decode() if args.json else table(figures))
    return 0


def _batch_sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise ConfigError(f"--batch-sizes: must be whole numbers with commas between, got {text!r}") from None
    for size in sizes:
        if not 1 <= size <= _MAX_BATCH_SIZE:
            raise ConfigError(f"--batch-sizes: must be between 1 and {_MAX_BATCH_SIZE}, got {size}")
    return sizes


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
