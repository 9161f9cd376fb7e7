"""Packed products against torch's bf16 linear, by number of rows, at the shapes of SmolLM2-135M.

    scripts/bench_kernels [--threads 2] [--rows 1,8,64] [--formats int8,int4]

Weights of all layers are read one after the other, as a forward pass does, so that one row finds them in memory and not
in a cache. The time of a matrix is the least of several rounds, in which the formats take turns: other programs slow
some rounds down, and speed up none. Each product is a call from Python, which takes some 10 us of the 20 to 60 of one
row: what a row gets is best seen at the head, `--shapes head`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor

from procengine.kernels.linear.native import packed_linear
from procengine.kernels.linear.packed import GGML_FORMATS, PackedFormat, PackedMatrix, WeightMemory
from procengine.kernels.native import library

LAYER = {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}  # [N, K]
HEAD = {"head": (49152, 576)}
TORCH = "torch bf16"
FORMATS = {
    "bf16": PackedFormat("bf16"),
    "int8": PackedFormat("int8"),
    "int8 channel": PackedFormat("int8", channel_scales=True),
    "int4": GGML_FORMATS["Q4_0"],
    "int4 mins": GGML_FORMATS["Q4_1"],
}
# How often the shapes come, each time with other weights: together far more than a cache holds. From MANY_ROWS on
# arithmetic counts, and fewer tell as much.
REPEATS = {"layer": 30, "head": 6}
MANY_ROWS = 64


class Contender:
    """One format's matrices, and the least time that each has taken."""

    def __init__(self, name: str, shapes: list[tuple[int, int]]) -> None:
        self.name = name
        self.shapes = shapes
        self.num_bytes: list[int] = []
        self.products: list[Callable[[Tensor], object]] = []
        if name == TORCH:
            self._add_torch_matrices()
        else:
            self._add_packed_matrices(FORMATS[name])

    def _add_torch_matrices(self) -> None:
        for shape in self.shapes:
            weight = torch.randn(shape, dtype=torch.bfloat16) * 0.02
            self.num_bytes.append(weight.numel() * 2)
            self.products.append(partial(functional.linear, weight=weight))

    def _add_packed_matrices(self, packed_format: PackedFormat) -> None:
        self.num_bytes = [PackedMatrix.packed_bytes(packed_format, *shape) for shape in self.shapes]
        memory = WeightMemory(sum(self.num_bytes))
        for shape in self.shapes:
            matrix = PackedMatrix(packed_format, *shape, memory)
            matrix.pack((torch.randn(shape) * 0.02).numpy())
            self.products.append(partial(packed_linear, weight=matrix))

    def run(self, inputs: dict[int, Tensor], best: list[float]) -> None:
        """Multiply by the first len(best) matrices, and lower the times in `best` where this took less."""
        for index in range(len(best)):
            x = inputs[self.shapes[index][1]]
            start = time.perf_counter()
            self.products[index](x)
            best[index] = min(best[index], time.perf_counter() - start)


def measure(contenders: list[Contender], rows: int, num_matrices: int, seconds: float) -> list[tuple[float, float]]:
    """GB/s of weights and GFLOP/s of each, for `rows` rows."""
    shapes = contenders[0].shapes[:num_matrices]
    inputs = {k: torch.randn(rows, k, dtype=torch.bfloat16) for _, k in shapes}
    best = [[float("inf")] * num_matrices for _ in contenders]
    end, rounds = time.perf_counter() + seconds * len(contenders), 0
    while rounds < 3 or time.perf_counter() < end:
        for contender, times in zip(contenders, best, strict=True):
            contender.run(inputs, times)
        rounds += 1
    operations = 2 * rows * sum(n * k for n, k in shapes)
    return [
        (sum(contender.num_bytes[:num_matrices]) / sum(times) / 1e9, operations / sum(times) / 1e9)
        for contender, times in zip(contenders, best, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,256,1024", help="numbers of rows, by commas")
    parser.add_argument("--formats", default=",".join((TORCH, *FORMATS)), help="by commas, of: %(default)s")
    parser.add_argument("--shapes", choices=REPEATS, default="layer", help="a layer's matrices, or the vocabulary's")
    parser.add_argument("--seconds", type=float, default=0.5, help="per format and number of rows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library.set_num_threads(args.threads)
    once = list((LAYER if args.shapes == "layer" else HEAD).values())
    repeats = REPEATS[args.shapes]
    with torch.inference_mode():
        contenders = [Contender(name, once * repeats) for name in args.formats.split(",")]
        print(f"{args.threads} threads, {library.best_isa().name}: GB/s of weights, GFLOP/s")
        print("| rows | " + " | ".join(contender.name for contender in contenders) + " |")
        print("| ---: |" + " ---: |" * len(contenders))
        for rows in (int(number) for number in args.rows.split(",")):
            num_matrices = len(once) * (repeats if rows < MANY_ROWS else min(repeats, 4))
            figures = measure(contenders, rows, num_matrices, args.seconds)
            cells = (f"{gigabytes:.1f}, {gigaflops:.0f}" for gigabytes, gigaflops in figures)
            print(f"| {rows} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
