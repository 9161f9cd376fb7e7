"""`FetchPool`: arrays on their way from the device to the host.

Owns: host memory for them, which goes round. Never does: wait for the device on the thread that asks for a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from procengine.device_streams import Streams

__all__ = ["FetchPool"]

_SMALLEST = 1 << 12  # bytes
_ALIGNMENT = 16


class FetchPool:
    """`fetch` is for one thread, and what it returns for any other."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._free: dict[int, deque[Tensor]] = {}  # by size, a power of two

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[NDArray[Any]]]:
        """Begin to copy; the returned function, called once, waits for it."""
        sizes = [-(-one.numel() * one.element_size() // _ALIGNMENT) * _ALIGNMENT for one in tensors]
        memory = self._take(sum(sizes))
        begins = accumulate(sizes, initial=0)
        places = [
            memory[begin : begin + one.numel() * one.element_size()].view(one.dtype).view(one.shape)
            for one, begin in zip(tensors, begins, strict=False)
        ]
        copied = self._streams.copy_out(list(zip(tensors, places, strict=True)))
        sources = list(tensors)  # they must live until they are copied

        def wait() -> list[NDArray[Any]]:
            copied.synchronize()
            sources.clear()
            found = [place.numpy().copy() for place in places]
            self._free[memory.numel()].append(memory)
            return found

        return wait

    def _take(self, num_bytes: int) -> Tensor:
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length()) if num_bytes else _SMALLEST
        free = self._free.setdefault(size, deque())  # whose two ends are safe to use from two threads
        return free.popleft() if free else self._streams.host_memory(size)
