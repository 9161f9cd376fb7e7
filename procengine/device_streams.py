"""`Streams`: how work that overlaps is ordered on a device: a stream for copies in and one for copies out beside the
one that computes, and graphs of work that is always the same.

Owns: the calls of torch.cuda for these, and their meaning on the host, where everything is done at once and in order.
Never does: decide what is copied or captured, or wait for the device unless asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CudaStreams", "Event", "HostStreams", "Streams", "open_streams"]


class Event(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """The calling thread waits until the device is past it. On any thread."""
        ...


class Streams(Protocol):
    """Of one device. What torch is told to do otherwise happens on the computing stream, in the order told."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """uint8 on the host, from and to which copies go by themselves."""
        ...

    def mark(self) -> Event:
        """The point behind all computing that was told so far."""
        ...

    def copy_in_order(self, source: Tensor, target: Tensor) -> None:
        """Fill `target` from the host between what was told so far and what is told from now on."""
        ...

    def copy_in(self, source: Tensor, target: Tensor, after: Event | None) -> Event:
        """Fill `target` once the device is past `after`, and compute what is told from now on when that is done."""
        ...

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        """Copy sources to targets on the host, behind the computing told so far and beside what is told from now on.
        The sources must live, and not be written again, until the device is past the event."""
        ...

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """(a function that does the work again, where its result is each time). The work is done at least once."""
        ...


class HostStreams:
    """Streams of a CPU."""

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self) -> Event:
        return _Passed()

    def copy_in_order(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def copy_in(self, source: Tensor, target: Tensor, after: Event | None) -> Event:
        target.copy_(source)
        return _Passed()

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        for source, target in pairs:
            target.copy_(source)
        return _Passed()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = work()

        def replay() -> None:
            result.copy_(work())

        return replay, result


class _Passed:
    """An event on a device that is never behind."""

    def synchronize(self) -> None:
        return


class CudaStreams:
    """Streams of a GPU. To be used on one thread, but for `Event.synchronize`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # One for all captures: cuBLAS keeps a workspace (32 MiB on Hopper) for each stream that it was ever used on.
        self._aside = torch.cuda.Stream(device)
        self._graph_memory: Any = None  # of all graphs: only one runs at a time

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Event:
        return self._record(torch.cuda.current_stream(self._device))

    def copy_in_order(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def copy_in(self, source: Tensor, target: Tensor, after: Event | None) -> Event:
        with torch.cuda.stream(self._in):
            if after is not None:
                self._wait(self._in, after)
            target.copy_(source, non_blocking=True)
            copied = self._record(self._in)
        self._wait(torch.cuda.current_stream(self._device), copied)
        return copied

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        self._wait(self._out, self.mark())
        with torch.cuda.stream(self._out):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            return self._record(self._out)

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        main = torch.cuda.current_stream(self._device)
        self._aside.wait_stream(main)
        with torch.cuda.stream(self._aside):  # once before: what is compiled or allocated on first use is not captured
            work()
        main.wait_stream(self._aside)
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Graphs share memory only where they were captured on the same stream. thread_local: other threads may wait for
        # events meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=self._aside, capture_error_mode=mode):
            result = work()
        return graph.replay, result

    def _record(self, stream: torch.cuda.Stream) -> Event:
        event = torch.cuda.Event(blocking=True)  # whoever waits sleeps
        event.record(stream)
        return event

    def _wait(self, stream: torch.cuda.Stream, event: Any) -> None:
        """The stream waits; the host does not."""
        stream.wait_event(event)


def open_streams(device: torch.device) -> Streams:
    """Those of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
