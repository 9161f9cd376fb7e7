"""What a decode step costs, by batch size and by context length, beside what the machine allows at best.

    scripts/bench scaling --json scaling.json --plot scaling.svg      # all formats
    scripts/bench scaling --formats int8 --json int8.json             # in pieces
    scripts/bench scaling --merge int8.json bf16.json --plot scaling.svg

A step's time is the worker's own, from taking it up until its tokens are sampled, read from the spans of a running
group (`procengine bench depth` has the gaps between steps): the median of a run, and of its rounds the least; the
picture shows the least of all, which other programs on the machine disturb least. The bound
(procengine/bench/roofline.py) follows from the machine's limits: reading memory with all threads, and the bf16 and int8
matrix products of torch (oneDNN), each the best that was seen.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "scaling"))
from scaling_plot import draw

from procengine.bench.decode_bench import DecodeBench
from procengine.bench.roofline import DecoderShape, MachineLimits, decode_bound_ms
from procengine.bench.workload import BenchRequest
from procengine.config import EngineConfig, ModelConfig
from procengine.engine_args import EngineArgs
from procengine.errors import ConfigError, ProcengineError
from procengine.gguf_file import GGUFFile
from procengine.resolve import resolve

FORMATS: Final[dict[str, dict[str, Any]]] = {
    "4-bit": {},  # as the file has them
    "int8": {"quantization": "int8"},
    "bf16": {"quantization": "none"},
}
BITS: Final = {"int8": 8.5, "bf16": 16.0}  # a weight; int8 with an fp16 scale for 32
OPERANDS: Final = {"4-bit": "int8", "int8": "int8", "bf16": "bf16"}
OUTPUT_LEN: Final = 40
KV_BYTES: Final = 2 << 30  # pages that are not used cost nothing
# Prompts beside decoding rows are short on a CPU: of 64 requests, the first would end before the last decodes.
PROMPT_TOKENS: Final = 2048


class Measured(msgspec.Struct):
    """What a file holds: the machine's limits, and a row for each point; `bound_ms` follows from both."""

    model: str
    shape: DecoderShape
    limits: MachineLimits
    threads: int
    rows: list[dict[str, Any]]


def weight_bytes(name: str, model: ModelConfig, shape: DecoderShape) -> int:
    """What a step reads of the matrices."""
    if name in BITS:
        return int((shape.num_layer_weights + shape.num_head_weights) * BITS[name] / 8)
    return sum(tensor.nbytes for tensor in GGUFFile(model.path).tensors.values())


def shape_of(model: ModelConfig) -> DecoderShape:
    """The sizes that a bound needs."""
    return DecoderShape(
        *(model.num_layers, model.hidden_size, model.intermediate_size),
        *(model.num_heads, model.num_kv_heads, model.head_dim, model.vocab_size),
    )


def points(args: argparse.Namespace, max_context_len: int) -> Iterator[tuple[str, int, int]]:
    """(sweep, batch size, tokens of each prompt); contexts grow, so that prompts find their beginnings in the cache."""
    for batch_size in args.batch_sizes:
        yield "batch", batch_size, args.input_len
    for batch_size, limit in ((1, max_context_len), (8, args.max_context_of_8)):
        for context_len in args.context_lens:
            if context_len <= limit:
                yield "context", batch_size, context_len


def measure(args: argparse.Namespace) -> Measured:
    """All formats that were asked for, and the machine."""
    from machine_limits import measure_limits  # torch

    model = resolve(EngineArgs(model=args.model)).model
    rows = [row for name in args.formats for row in measure_format(args, name)]
    return Measured(model.name, shape_of(model), measure_limits(args.threads, seconds=2.0), args.threads, rows)


def measure_format(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """The points of one format of weights."""
    own = {"name": f"scaling-{os.getpid()}", "threads": args.threads, "kv_cache_memory": KV_BYTES}
    own |= {"max_num_batched_tokens": PROMPT_TOKENS} | FORMATS[name]
    config = resolve(EngineArgs(model=args.model, **own))
    model, most = config.model, config.scheduler.max_model_len - OUTPUT_LEN
    args.context_lens = sorted({min(context_len, most) for context_len in args.context_lens})
    rows = []
    with DecodeBench(config) as bench:
        bench.run(8, 64, OUTPUT_LEN, seed=1)
        for sweep, batch_size, context_len in points(args, most):
            found = [
                bench.run_requests(requests(config, batch_size, context_len, args.seed)) for _ in range(args.rounds)
            ]
            pass_ms = min(one.pass_ms for one in found)
            rows.append(
                {
                    "format": name,
                    "weight_bytes": weight_bytes(name, model, shape_of(model)),
                    "sweep": sweep,
                    "batch_size": batch_size,
                    "context_len": context_len + OUTPUT_LEN // 2,
                    "pass_ms": pass_ms,
                    "least_pass_ms": min(one.least_pass_ms for one in found),
                }
            )
            say(f"{name}: {batch_size} requests, {context_len} tokens: {pass_ms:.2f} ms a step")
    return rows


def requests(config: EngineConfig, batch_size: int, context_len: int, seed: int) -> list[BenchRequest]:
    """Prompts that begin like the shorter ones of the same seed."""
    generators = [np.random.default_rng((seed, number)) for number in range(batch_size)]
    vocab_size = config.model.vocab_size
    return [
        BenchRequest(one.integers(0, vocab_size, context_len).tolist(), OUTPUT_LEN, "--context-lens")
        for one in generators
    ]


def merge(files: Sequence[Measured]) -> Measured:
    """Of the limits, the best that was seen: less means that somebody else used the machine."""
    best = MachineLimits(
        max(one.limits.read_gb_per_s for one in files),
        {key: max(one.limits.gop_per_s[key] for one in files) for key in files[0].limits.gop_per_s},
    )
    return msgspec.structs.replace(files[0], limits=best, rows=[row for one in files for row in one.rows])


def read_file(path: Path) -> Measured:
    """What --json has written."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"--merge: {path} cannot be read: {error}") from error


def add_bounds(measured: Measured) -> None:
    """What each step takes at least."""
    for row in measured.rows:
        row["bound_ms"] = decode_bound_ms(
            *(measured.shape, measured.limits, row["weight_bytes"], OPERANDS[row["format"]]),
            *(row["batch_size"], row["context_len"]),
        )


def table(measured: Measured) -> str:
    """For people."""
    limits = measured.limits
    lines = [
        f"{measured.threads} threads: {limits.read_gb_per_s:.1f} GB/s read, "
        + ", ".join(f"{gop:.0f} GOP/s {name}" for name, gop in limits.gop_per_s.items()),
        f"{'weights':<8} {'requests':>8} {'context':>8} {'ms a step':>10} {'least':>8} {'bound':>8} {'of bound':>9}",
    ]
    lines += [
        f"{row['format']:<8} {row['batch_size']:>8} {row['context_len']:>8} {row['pass_ms']:>10.2f} "
        f"{row['least_pass_ms']:>8.2f} {row['bound_ms']:>8.2f} {row['bound_ms'] / row['pass_ms']:>9.0%}"
        for row in measured.rows
    ]
    return "\n".join(lines)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def numbers(text: str) -> list[int]:
    """ "1,2,4"."""
    return sorted({int(word) for word in text.split(",")})


def parse_arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(
        prog="scripts/bench scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = cli.add_argument
    add("--model", default="smollm2-135m", help="a GGUF file with tied embeddings [%(default)s]")
    add("--formats", type=lambda text: text.split(","), default=list(FORMATS), help=f"of {','.join(FORMATS)} [all]")
    add("--batch-sizes", type=numbers, default="1,2,4,8,16,32,64", metavar="LIST", help="[%(default)s]")
    add("--input-len", type=int, default=128, metavar="N", help="tokens of prompts in the sweep of batch sizes [128]")
    add("--context-lens", type=numbers, default="128,256,512,1024,2048,4096,8192", metavar="LIST", help="[%(default)s]")
    add("--max-context-of-8", type=int, default=2048, metavar="N", help="longest context of 8 requests at once [2048]")
    add("--rounds", type=int, default=2, metavar="N", help="runs of each point; the best counts [2]")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="of the worker [all cores]")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts [0]")
    add("--json", type=Path, metavar="FILE", help="all figures go there")
    add("--plot", type=Path, metavar="FILE.svg", help="the picture goes there")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing: what --json has written")
    args = cli.parse_args()
    for name in args.formats:
        if name not in FORMATS:
            cli.error(f"--formats: {name!r} is none of {', '.join(FORMATS)}")
    for option in ("input_len", "rounds", "threads"):
        if getattr(args, option) < 1:
            cli.error(f"--{option.replace('_', '-')}: must be at least 1, got {getattr(args, option)}")
    return args


def main() -> None:
    args = parse_arguments()
    measured = merge([read_file(path) for path in args.merge]) if args.merge else measure(args)
    add_bounds(measured)
    print(table(measured))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.encode(measured))
    if args.plot is not None:
        draw(measured.rows, f"A decode step of {measured.model}, {measured.threads} threads", args.plot)


if __name__ == "__main__":
    try:
        main()
    except ProcengineError as error:
        sys.exit(f"error: {error}")
