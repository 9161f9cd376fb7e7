"""`StagingRing`: the buffers through which step payloads reach the device, one copy a step.

Owns: buffers on the host and on the device, and the events that fence their reuse. Never does: interpret a payload.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from procengine.device_streams import Event, Streams

__all__ = ["StagingRing"]

_FIRST_SIZE = 1 << 16  # int32


class StagingRing:
    """`depth` pairs of buffers used in turn (`step_id % depth`), so that a step's payload is copied while the steps
    before it compute."""

    def __init__(self, depth: int, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._pairs = [self._allocate(_FIRST_SIZE) for _ in range(depth)]
        self._copied: list[Event | None] = [None] * depth  # the host's buffer may be filled again
        # The device's may: at first when it is past what its memory was before.
        self._used: list[Event] = [streams.mark()] * depth
        self._last: int | None = None

    def stage(self, step_id: int, payload: NDArray[np.int32]) -> tuple[NDArray[np.int32], Tensor]:
        """The payload as a host array and as a device tensor, int32 [n]; both are valid until `depth` steps later."""
        if self._last is not None:  # all that reads the last step's tensor has been told by now
            self._used[self._last] = self._streams.mark()
        at = self._last = step_id % len(self._pairs)
        copied = self._copied[at]
        if copied is not None:
            copied.synchronize()  # long past in steady state: `depth` steps have gone by
        if self._pairs[at][0].numel() < payload.size:
            self._pairs[at] = self._allocate(2 * payload.size)
            self._used[at] = self._streams.mark()
        on_host, on_device = (buffer[: payload.size] for buffer in self._pairs[at])
        host: NDArray[np.int32] = on_host.numpy()
        host[:] = payload
        self._copied[at] = self._streams.copy_in(on_host, on_device, self._used[at])
        return host, on_device

    def _allocate(self, size: int) -> tuple[Tensor, Tensor]:
        host = self._streams.host_memory(4 * size).view(torch.int32)
        return host, torch.empty(size, dtype=torch.int32, device=self._device)
