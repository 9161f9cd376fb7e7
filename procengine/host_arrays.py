"""`HostArrays`: numpy arrays, for runners on the CPU whose model is in the native library.

Owns: how numpy does what `Arrays` asks for. Never does: load torch, but for a plug-in that computes with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.arrays import ElementType, RowKernels
from procengine.kernels.logits import native as logits
from procengine.kernels.native.arguments import BFLOAT16
from procengine.kernels.native.zeroed_memory import zeroed_memory
from procengine.kernels.pooling import native as pooling
from procengine.kernels.sampling import native as sampling

__all__ = ["HostArrays"]

logger = logging.getLogger(__name__)

HostArray = NDArray[Any]
_LARGE = 1 << 20  # bytes: such as the KV pool's, which fill little by little
_KERNELS: RowKernels[HostArray] = RowKernels(
    logits.add_rows,
    logits.apply_penalties,
    logits.apply_token_bitmask,
    logits.ban_sequences,
    logits.ban_tokens_before,
    sampling.gather_logprobs,
    pooling.pool_last,
    pooling.pool_mean,
)


class HostArrays:
    """Arrays[HostArray]. bfloat16 is kept as its bits, uint16."""

    kernels = _KERNELS
    memory_errors: tuple[type[Exception], ...] = (MemoryError,)

    def new(self, shape: Sequence[int], dtype: ElementType, fill: float = 0) -> HostArray:
        own = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
        if fill:
            return np.full(shape, fill, own)
        num_bytes = math.prod(shape) * own.itemsize
        if num_bytes < _LARGE:
            return np.zeros(shape, own)
        return zeroed_memory(num_bytes, huge_pages=False).view(own).reshape(shape)

    def send(self, values: HostArray) -> HostArray:
        return values

    def fetch(self, arrays: Sequence[HostArray]) -> Callable[[], list[HostArray]]:
        return lambda: list(arrays)

    def open_staging(self, depth: int) -> HostStaging:
        return HostStaging()

    def widen(self, array: HostArray) -> HostArray:
        return array.astype(np.int64)

    def as_floats(self, bits: HostArray) -> HostArray:
        return np.ascontiguousarray(bits).view(np.float32)

    def to_float32(self, array: HostArray) -> HostArray:
        return array.astype(np.float32, copy=False)

    def where(self, condition: HostArray, yes: HostArray, no: HostArray | int) -> HostArray:
        return np.where(condition, yes, no)

    def concatenate(self, parts: Sequence[HostArray], axis: int) -> HostArray:
        return np.concatenate(parts, axis)

    def without_gradients(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def on_tensors(self, function: Callable[..., Any], why: str) -> Callable[..., HostArray]:
        torch = _load_torch(why)

        def run(array: HostArray, *others: Any) -> HostArray:
            with torch.inference_mode():
                result: HostArray = function(torch.from_numpy(array), *others).contiguous().numpy()
            return result

        return run


@cache  # and with it one line in the log
def _load_torch(why: str) -> ModuleType:
    logger.warning("loading torch, which takes some 190 MB of memory: %s", why)
    import torch

    torch.set_num_threads(1)  # the cores belong to the kernels' own threads
    return torch


class HostStaging:
    """The device is the host: one copy, which aligns."""

    def stage(self, step_id: int, payload: NDArray[np.int32]) -> tuple[NDArray[np.int32], HostArray]:
        staged = payload.copy()
        return staged, staged
