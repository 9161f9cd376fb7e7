"""The options of `procengine bench serve|throughput|latency`, and whether they fit each other.

Owns: names, defaults and help texts; those of `vllm bench serve` where it has them. Never does: read a file.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Final

from procengine.bench.latency_metrics import LATENCY_METRICS
from procengine.cli.engine_args import add_engine_arguments, given_flags
from procengine.cli.examples import add_examples
from procengine.errors import ConfigError

__all__ = ["NUM_PROMPTS", "add_arguments", "check_load_arguments", "run"]

NUM_PROMPTS: Final = {"throughput": 64, "latency": 8, "serve": 1000}
_INPUT_LEN: Final = {"throughput": 128, "latency": 128, "serve": 1024}
_EXAMPLES: Final = {
    "throughput": (
        ("procengine bench throughput smollm2-135m --num-prompts 16", "with a model"),
        ("procengine bench throughput smollm2-135m --device mock --max-num-seqs 1024 --num-prompts 1024", "without"),
    ),
    "latency": (
        ("procengine bench latency smollm2-135m --input-len 32 --output-len 64", "one request after the other"),
        ("procengine bench latency smollm2-135m --json --quantization int8", "for programs"),
    ),
    "serve": (
        ("procengine bench serve --request-rate 2 --num-prompts 20 --input-len 64", "the running group"),
        ("procengine bench serve --max-concurrency 8 --num-prompts 100 --http", "the same over HTTP, closed loop"),
        (
            "procengine bench serve smollm2-135m --goodput ttft:200 tpot:50",
            "a private group, and its goodput",
        ),
    ),
}
_FIGURES: Final = (
    "ttft: time to the first tokens; itl: between two messages with tokens; tpot: per token after the first; "
    "e2el: whole request."
)
_PACES: Final = {
    "throughput": "All requests are sent at once.",
    "latency": "A request is sent when the answer to the one before is complete.",
    "serve": "Requests arrive over time: open loop with --request-rate or a trace, closed loop with --max-concurrency."
    "\n"
    "With MODEL, a private group is launched and torn down; without, the running group is measured (see --group).\n"
    "With planned arrivals, latencies count from the planned time, not from when the client got round to sending, and\n"
    "the lateness of sending is reported.",
}


def add_arguments(parser: argparse.ArgumentParser, mode: str) -> None:
    """Declare the arguments of one of the three modes."""
    parser.description = f"{_PACES[mode]}\n{_FIGURES}"
    add_examples(parser, *_EXAMPLES[mode])
    if mode == "serve":
        parser.add_argument("model", metavar="MODEL", nargs="?", help="as for `serve`; none: measure a running group")
        parser.add_argument("--group", metavar="GROUP", help="name or endpoint of the group [the only running one]")
        parser.add_argument("--http", action="store_true", help="send them to the group's HTTP front door (--port)")
        _add_pace_arguments(parser)
    add_engine_arguments(parser, mentions_model=mode != "serve")
    _add_workload_arguments(parser, mode)
    _add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    # Here, not above: what measures loads numpy, which `--help` and completion need not wait for.
    from procengine.cli.bench_load import measure

    return measure(args)


def _add_pace_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("arrivals").add_argument
    add("--request-rate", type=float, default=math.inf, metavar="X", help="requests a second; inf is all at once [inf]")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="shape of the gamma distribution of gaps: 1 is Poisson, less is burstier, more is steadier [1]",
    )
    add("--max-concurrency", type=int, metavar="N", help="most requests under way [no limit]")
    add("--time-scale", type=float, default=1.0, metavar="X", help="of a trace: 0.5 replays it twice as fast [1]")


def _add_workload_arguments(parser: argparse.ArgumentParser, mode: str) -> None:
    add = parser.add_argument_group("work load").add_argument
    add(
        "--dataset-name",
        choices=("random", "prefix", "jsonl", "trace"),
        default="random",
        help="random: token ids; prefix: with shared beginnings; jsonl: prompts of a file; trace: lengths and times of "
        "a CSV with the columns of the Azure LLM inference traces [random]",
    )
    add("--dataset-path", type=Path, metavar="FILE", help="of jsonl and trace")
    if mode != "serve":
        add("--prompts", type=Path, metavar="FILE", help="a JSON list of texts or token id lists")
    number = NUM_PROMPTS[mode]
    add("--num-prompts", type=int, metavar="N", help=f"how many requests [{number}; all of a file]")
    length = _INPUT_LEN[mode]
    add(
        "--input-len",
        "--random-input-len",
        type=int,
        default=length,
        metavar="N",
        help=f"tokens of a prompt [{length}]",
    )
    add("--output-len", "--random-output-len", type=int, default=128, metavar="N", help="tokens of an answer [128]")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="lengths vary uniformly by this share, up and down, in [0, 1) [0]",
    )
    add(
        "--prefix-len",
        type=int,
        default=256,
        metavar="N",
        help="tokens of a shared beginning, before --input-len [256]",
    )
    add("--num-prefixes", type=int, default=10, metavar="N", help="different beginnings [10]")
    add("--skip-unfit", action="store_true", help="leave out requests of a file that do not fit the model")
    add("--seed", type=int, default=0, metavar="N", help="of random prompts, lengths and arrivals [0]")
    add("--warmup", "--num-warmups", type=int, default=4, metavar="N", help="requests before the measured ones [4]")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="go on past end tokens [on]")
    add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy [0]")


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("report").add_argument
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="objectives of ttft, tpot, e2el: count the requests that meet all, e.g. ttft:200 tpot:50",
    )
    shown = ",".join(LATENCY_METRICS)
    add("--percentile-metrics", default=shown, metavar="LIST", help=f"latencies to report [{shown}]")
    add("--metric-percentiles", default="90,99", metavar="LIST", help="beside mean and median [90,99]")
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", type=Path, metavar="FILE.png", help="draw distributions and course (needs the extra `plot`)")


def check_load_arguments(args: argparse.Namespace) -> None:
    """Refuse what makes no sense, before anything is launched.

    Raises:
        ConfigError: an option is out of range or does not fit another.
    """
    for name, low in (
        ("num_prompts", 1),
        ("input_len", 1),
        ("output_len", 1),
        ("warmup", 0),
        ("prefix_len", 1),
        ("num_prefixes", 1),
        ("seed", 0),
    ):
        value = getattr(args, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {low}, got {value}")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio: must be at least 0 and less than 1, got {args.random_range_ratio}")
    _check_source(args)
    if args.mode == "serve":
        _check_pace(args)
        _check_target(args)


def _check_source(args: argparse.Namespace) -> None:
    needs_file = args.dataset_name in ("jsonl", "trace")
    if getattr(args, "prompts", None) is not None and (args.dataset_name != "random" or args.dataset_path is not None):
        raise ConfigError("--prompts: cannot be given together with --dataset-name or --dataset-path")
    if needs_file and args.dataset_path is None:
        raise ConfigError(f"--dataset-path: must be given with --dataset-name {args.dataset_name}")
    if args.dataset_path is not None and not needs_file:
        raise ConfigError(f"--dataset-path: --dataset-name {args.dataset_name} reads no file, got {args.dataset_path}")


def _check_pace(args: argparse.Namespace) -> None:
    if not args.request_rate > 0:
        raise ConfigError(f"--request-rate: must be more than 0, got {args.request_rate}")
    for name in ("burstiness", "time_scale"):
        value = getattr(args, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}: must be finite and more than 0, got {value}")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency: must be at least 1, got {args.max_concurrency}")
    if args.dataset_name == "trace" and not math.isinf(args.request_rate):
        raise ConfigError("--request-rate: a trace has arrival times of its own; --time-scale stretches them")
    if args.dataset_name != "trace" and args.time_scale != 1:
        raise ConfigError("--time-scale: stretches the times of a trace; there is none")


def _check_target(args: argparse.Namespace) -> None:
    if args.model is not None and args.group is not None:
        raise ConfigError("--group: MODEL launches a group of its own; give one of the two")
    if args.model is not None:
        return
    for flag in given_flags(args):
        raise ConfigError(f"{flag}: belongs to a group that is launched; give MODEL")
