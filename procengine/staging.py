"""`StagingRing`: the host buffers through which step payloads reach the device, one copy a step.

Owns: pinned buffers and the events that fence their reuse. Never does: interpret a payload.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["StagingRing"]


class StagingRing:
    """`depth` buffers used in turn (`step_id % depth`), so that filling one never waits for the copy out of another.

    On a GPU a buffer is pinned and its copy is one `cudaMemcpyAsync`; an event says when it may be filled again. On the
    CPU the buffer is the device tensor, and the copy into it is the only one.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._buffers = [self._allocate(1 << 16) for _ in range(depth)]
        self._copied: list[torch.cuda.Event | None] = [None] * depth

    def stage(self, step_id: int, payload: NDArray[np.int32]) -> tuple[NDArray[np.int32], Tensor]:
        """The payload as a host array and as a device tensor, int32 [n]; both are valid until `depth` steps later."""
        at = step_id % len(self._buffers)
        event = self._copied[at]
        if event is not None:
            event.synchronize()  # long past in steady state: `depth` steps have gone by
        if self._buffers[at].numel() < payload.size:
            self._buffers[at] = self._allocate(2 * payload.size)
        staged = self._buffers[at][: payload.size]
        host: NDArray[np.int32] = staged.numpy()
        host[:] = payload
        if not self._is_cuda:
            return host, staged
        on_device = staged.to(self._device, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._copied[at] = done
        return host, on_device

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._is_cuda)
