"""`SendArena`: small arrays on their way to the device, through memory that the device reads by itself.

Owns: chunks of host memory, used in turn, and the events that fence their reuse. Never does: say what an array is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from procengine.device_streams import Event, Streams

__all__ = ["SendArena"]

_NUM_CHUNKS = 4
_CHUNK_BYTES = 1 << 18
_ALIGNMENT = 16  # bytes


class SendArena:
    """An array is copied into a chunk at once, and from there when the device gets to it. A chunk holds what many steps
    send, so the device has long read it when its turn comes again."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._chunks = [streams.host_memory(_CHUNK_BYTES) for _ in range(_NUM_CHUNKS)]
        self._read: list[Event | None] = [None] * _NUM_CHUNKS
        self._at, self._used = 0, 0

    def send(self, values: NDArray[Any]) -> Tensor:
        """The same values on the device. `values` may change as soon as this returns."""
        source = torch.from_numpy(np.ascontiguousarray(values))
        place = self._take(values.nbytes).view(source.dtype).view(source.shape)
        place.copy_(source)
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self._streams.copy_in_order(place, target)
        return target

    def _take(self, num_bytes: int) -> Tensor:
        if self._used + num_bytes > self._chunks[self._at].numel():
            self._turn(num_bytes)
        begin = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._chunks[self._at][begin : begin + num_bytes]

    def _turn(self, num_bytes: int) -> None:
        self._read[self._at] = self._streams.mark()
        self._at, self._used = (self._at + 1) % _NUM_CHUNKS, 0
        read = self._read[self._at]
        if read is not None:
            read.synchronize()
        if self._chunks[self._at].numel() < num_bytes:
            self._chunks[self._at] = self._streams.host_memory(num_bytes)
