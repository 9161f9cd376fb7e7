"""`TorchArrays`: tensors, for runners on a GPU, and on a CPU for a model in torch.

Owns: how torch does what `Arrays` asks for; copies to and from a GPU are asynchronous. Never does: compute a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from procengine.arrays import ElementType, RowKernels
from procengine.device_streams import Streams, open_streams
from procengine.fetch_pool import FetchPool
from procengine.kernels.logits import reference as logits
from procengine.kernels.operations import TORCH_OPERATIONS, Operations
from procengine.kernels.pooling import reference as pooling
from procengine.send_arena import SendArena
from procengine.staging import StagingRing

__all__ = ["TorchArrays"]


class TorchArrays:
    """Arrays[Tensor]."""

    memory_errors: tuple[type[Exception], ...] = (torch.OutOfMemoryError, MemoryError)

    def __init__(
        self, device: torch.device, operations: Operations = TORCH_OPERATIONS, streams: Streams | None = None
    ) -> None:
        self.device = device
        self.streams = streams or open_streams(device)
        self._arena = SendArena(device, self.streams)
        self._fetches = FetchPool(self.streams)
        self.kernels: RowKernels[Tensor] = RowKernels(
            logits.add_rows,
            operations.apply_penalties,
            operations.apply_token_bitmask,
            logits.ban_sequences,
            logits.ban_tokens_before,
            operations.gather_logprobs,
            pooling.pool_last,
            pooling.pool_mean,
        )

    def new(self, shape: Sequence[int], dtype: ElementType, fill: float = 0) -> Tensor:
        own = getattr(torch, dtype)
        if self.device.type != "cpu" or fill:
            return torch.full(tuple(shape), fill, dtype=own, device=self.device)
        num_bytes = int(np.prod(shape)) * own.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(own).view(tuple(shape))

    def send(self, values: NDArray[Any]) -> Tensor:
        return self._arena.send(values)

    def fetch(self, arrays: Sequence[Tensor]) -> Callable[[], list[NDArray[Any]]]:
        return self._fetches.fetch(arrays)

    def open_staging(self, depth: int) -> StagingRing:
        return StagingRing(depth, self.device, self.streams)

    def widen(self, array: Tensor) -> Tensor:
        return array.long()

    def as_floats(self, bits: Tensor) -> Tensor:
        return bits.contiguous().view(torch.float32)

    def to_float32(self, array: Tensor) -> Tensor:
        return array.float()

    def where(self, condition: Tensor, yes: Tensor, no: Tensor | int) -> Tensor:
        return torch.where(condition, yes, no)

    def concatenate(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        return torch.cat(tuple(parts), axis)

    def without_gradients(self, function: Callable[..., Any]) -> Callable[..., Any]:
        wrapped: Callable[..., Any] = torch.inference_mode()(function)
        return wrapped

    def on_tensors(self, function: Callable[..., Any], why: str) -> Callable[..., Tensor]:
        return function
