"""`procengine bench throughput|latency MODEL`: measures a private group.

Owns: the work load. Never does: take times (`bench_run`) or compute figures (`bench_report`).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from procengine.bench_report import report, table
from procengine.bench_run import BenchClient
from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.errors import ConfigError
from procengine.groups import find_group
from procengine.launch import launch_group
from procengine.resolve import resolve
from procengine.sampling_params import SamplingParams

__all__ = ["add_arguments", "random_prompts", "read_prompts", "run"]

_Prompts: TypeAlias = list[str | list[int]]
_WARMUP_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Launch a private group, run a set of prompts through it and print figures: throughput sends all at once, "
        "latency one after\nthe other. ttft: time to the first tokens; itl: between two messages with tokens; "
        "tpot: per token after the first; e2e: whole request."
    )
    parser.add_argument("mode", choices=("throughput", "latency"))
    add_engine_arguments(parser)
    group = parser.add_argument_group("benchmark options")
    add = group.add_argument
    add("--num-prompts", type=int, metavar="N", help="how many prompts [64 for throughput, 8 for latency]")
    add("--input-len", type=int, default=128, metavar="N", help="tokens of each random prompt [128]")
    add("--output-len", type=int, default=128, metavar="N", help="tokens of each answer [128]")
    add(
        "--prompts", type=Path, metavar="FILE", help="a JSON list of texts or token id lists, instead of random prompts"
    )
    add("--seed", type=int, default=0, metavar="N", help="of the random prompts [0]")
    add("--warmup", type=int, default=4, metavar="N", help="requests before the measured ones [4]")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="go on past end tokens [on]")
    add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy [0]")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    _check(args)
    config = resolve(engine_args_from(args, default_name=f"bench-{os.getpid()}"))
    with launch_group(config) as group:
        client = BenchClient(find_group(group.endpoint))
        try:
            figures = _measure(client, args)
        finally:
            client.close()
    figures["config"] = msgspec.to_builtins(config)
    print(msgspec.json.encode(figures).decode() if args.json else table(figures))
    return 0


def random_prompts(num_prompts: int, num_tokens: int, vocab_size: int, seed: int) -> _Prompts:
    """Prompts of random token ids; no two share a beginning, so none is answered from the prefix cache."""
    generator = random.Random(seed)
    return [generator.choices(range(vocab_size), k=num_tokens) for _ in range(num_prompts)]


def read_prompts(path: Path) -> _Prompts:
    """Prompts from a file.

    Raises:
        ConfigError: it cannot be read, or is no JSON list of texts or id lists.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[str | list[int]])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--prompts: {path} is no readable JSON list of texts or token id lists ({error})") from error


def _measure(client: BenchClient, args: argparse.Namespace) -> dict[str, Any]:
    prompts = _prompts(args, client.welcome.vocab_size)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.output_len, ignore_eos=args.ignore_eos)
    _warm_up(client, args)
    client.stats(reset=True)
    run_prompts = client.run_all if args.mode == "throughput" else client.run_one_by_one
    print(f"{args.mode}: {len(prompts)} prompts ...", file=sys.stderr, flush=True)
    record = run_prompts(prompts, params)
    return {"mode": args.mode, **report(record, client.stats().values)}


def _warm_up(client: BenchClient, args: argparse.Namespace) -> None:
    """Pay for what happens once (lazy imports, allocations), with prompts that the measured ones do not begin with."""
    prompts = random_prompts(args.warmup, args.input_len, client.welcome.vocab_size, args.seed + 1)
    client.run_all(prompts, SamplingParams(temperature=0.0, max_tokens=_WARMUP_TOKENS, ignore_eos=True))


def _prompts(args: argparse.Namespace, vocab_size: int) -> _Prompts:
    if args.prompts is None:
        num_prompts = args.num_prompts or {"throughput": 64, "latency": 8}[args.mode]
        return random_prompts(num_prompts, args.input_len, vocab_size, args.seed)
    prompts = read_prompts(args.prompts)
    return prompts[: args.num_prompts]


def _check(args: argparse.Namespace) -> None:
    for name, low in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("warmup", 0)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {low}, got {value}")
