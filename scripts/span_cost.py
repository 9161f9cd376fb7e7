"""What always-on spans cost: output tokens per second with them and without, run by run in turn.

    .venv/bin/python scripts/span_cost.py smollm2-135m                 the real model
    .venv/bin/python scripts/span_cost.py smollm2-135m --device mock   everything but the model

Two groups stay up, one with spans and one with `--span-records 0`; one is asleep while the other is asked. The machine
may be noisy: only the ratio of neighbouring runs counts, and which of the two comes first alternates.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

import msgspec

from procengine import Client, SamplingParams
from procengine.launch import launch_group
from procengine.resolve import EngineArgs, resolve


def engine_args(args: argparse.Namespace, name: str, **options: object) -> EngineArgs:
    """A group named after this process."""
    values = {"model": args.model, "device": args.device, "name": f"{name}-{os.getpid()}", **options}
    return msgspec.convert(values, EngineArgs)


def tokens_per_second(client: Client, args: argparse.Namespace, seed: int) -> float:
    """One run: all prompts at once, new ones for every pair, so that no cache is warm by accident."""
    draw = random.Random(seed)
    prompts = [draw.choices(range(client.welcome.vocab_size), k=args.input_len) for _ in range(args.num_prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
    start = time.perf_counter()
    client.generate(prompts, params)
    return args.num_prompts * args.output_len / (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu", help="cpu or mock [cpu]")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, help="[64; mock: 1000]")
    args = parser.parse_args()
    args.output_len = args.output_len or (1000 if args.device == "mock" else 64)
    with (
        launch_group(resolve(engine_args(args, "spans-on"))) as with_spans,
        launch_group(resolve(engine_args(args, "spans-off", span_records=0))) as without_spans,
        Client(with_spans.endpoint) as on,
        Client(without_spans.endpoint) as off,
    ):
        for client in (on, off):
            tokens_per_second(client, args, seed=0)  # what happens once
        ratios = []
        for pair in range(args.pairs):
            order = (on, off) if pair % 2 else (off, on)
            speed = {client: tokens_per_second(client, args, seed=pair + 1) for client in order}
            ratios.append(speed[on] / speed[off])
            print(
                f"with spans {speed[on]:10,.0f} tok/s, without {speed[off]:10,.0f}, ratio {ratios[-1]:.3f}", flush=True
            )
    middle, spread = statistics.median(ratios), statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    print(f"ratio of {len(ratios)} pairs: median {middle:.4f}, mean {statistics.mean(ratios):.4f}, spread {spread:.4f}")


if __name__ == "__main__":
    main()
