"""The device under test: what it is, how fast it reads, and how long something takes on it.

Owns: timing. Never does: use a kernel of ours: a limit must not depend on what is compared with it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

__all__ = ["Machine"]


class Machine:
    """A GPU, or a CPU that stands for one in a dry run."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self._flushed: Tensor | None = None
        if not self.is_cuda:
            torch.set_num_threads(1)  # of tiny sizes: threads would only wait for each other

    @property
    def facts(self) -> dict[str, Any]:
        """For the head of the report."""
        import triton

        own: dict[str, Any] = {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": sys.version.split()[0],
            "device": str(self.device),
        }
        if self.is_cuda:
            properties = torch.cuda.get_device_properties(self.device)
            own |= {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),  # Triton needs one
            }
        return own

    @cached_property
    def bytes_per_s(self) -> float:
        """What a large copy moves, read and written: the bound of anything that memory limits."""
        size = (2 << 30) if self.is_cuda else (1 << 22)
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: target.copy_(source), repeats=10, is_least=True)

    @property
    def is_lost(self) -> bool:
        """Whether a kernel has done what nothing more can follow in this process."""
        try:
            self.wait()
        except RuntimeError:
            return True
        return False

    def wait(self) -> None:
        """Until the device has done all that was asked of it."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], Any], *, repeats: int = 20, is_least: bool = False) -> float:
        """The median time of a call (the least with `is_least`), on a device whose caches hold none of its data.

        On a GPU by events; the write that empties its cache also keeps it busy until the host has issued the call.
        """
        for _ in range(3 if self.is_cuda else 1):
            run()
        self.wait()
        found = self._on_gpu(run, repeats) if self.is_cuda else [_on_host(run) for _ in range(2)]
        return min(found) if is_least else statistics.median(found)

    def _on_gpu(self, run: Callable[[], Any], repeats: int) -> list[float]:
        if self._flushed is None:
            self._flushed = torch.empty(1 << 30, dtype=torch.uint8, device=self.device)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in pairs:
            self._flushed.zero_()
            begin.record()
            run()
            end.record()
        self.wait()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def _on_host(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
