"""What this machine can do at best: reading memory, and multiplying matrices in bf16 and int8, by torch (oneDNN). Where
there are no instructions for these, numbers of them can be multiplied as float32, which is faster than what torch does.

Owns: the measurement. Never does: use a kernel of ours: the bound must not depend on what is compared with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from typing import Final

import numpy as np
import torch

from procengine.bench.roofline import MachineLimits

_BLOCK_BYTES: Final = 1 << 26  # read in a millisecond or two: short enough to be left alone now and then
_NUM_BLOCKS: Final = 16  # by turns: far more than a cache holds
_SIZES: Final = ((512, 576, 1536), (1024, 576, 3072), (2048, 2048, 2048))  # M, K, N: one of them suits each library


def measure_limits(num_threads: int, seconds: float) -> MachineLimits:
    """The best of `seconds` for each limit: whatever else runs on the machine can only make it less."""
    torch.set_num_threads(num_threads)
    memory = np.ones(_NUM_BLOCKS * _BLOCK_BYTES // 4, np.float32)  # numpy asks for huge pages, torch does not
    blocks = cycle(torch.from_numpy(memory).chunk(_NUM_BLOCKS))
    read_gb_per_s = _BLOCK_BYTES / _least_s(lambda: next(blocks).sum(), seconds) / 1e9
    float32 = _best_gop_per_s(torch.matmul, torch.float32, seconds, 0.0)
    bf16 = _best_gop_per_s(torch.matmul, torch.bfloat16, seconds, float32)
    return MachineLimits(
        read_gb_per_s, {"bf16": bf16, "int8": _best_gop_per_s(_int8_product, torch.int8, seconds, bf16)}
    )


def _best_gop_per_s(
    multiply: Callable[[torch.Tensor, torch.Tensor], object], dtype: torch.dtype, seconds: float, least: float
) -> float:
    """Of all sizes, or `least` where the smallest does not even reach half of that: the largest would take a minute."""
    best = 0.0
    for size in _SIZES:
        best = max(best, _gop_per_s(multiply, dtype, *size, seconds))
        if best < least / 2:
            break
    return max(best, least)


def _int8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """int32 [M, N]. There is no public name for it."""
    return torch._int_mm(a, b)  # noqa: SLF001


def _gop_per_s(
    multiply: Callable[[torch.Tensor, torch.Tensor], object],
    dtype: torch.dtype,
    rows: int,
    inner: int,
    columns: int,
    seconds: float,
) -> float:
    a, b = (torch.randint(-8, 8, shape).to(dtype) for shape in ((rows, inner), (inner, columns)))
    return 2 * rows * inner * columns / _least_s(lambda: multiply(a, b), seconds / len(_SIZES)) / 1e9


def _least_s(work: Callable[[], object], seconds: float) -> float:
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
    return least
