"""`zeroed_memory`: memory for what a forward pass reads, in huge pages or in small ones.

Owns: that mapping. Never does: know what is kept there. Free of torch.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from procengine.kernels.native.arguments import address

__all__ = ["zeroed_memory"]

_HUGE_PAGE = 2 << 20


def zeroed_memory(num_bytes: int, *, huge_pages: bool) -> NDArray[np.uint8]:
    """uint8 [num_bytes], zeros, aligned to a page; each page takes memory when it is first written.

    Huge pages, where the system has them, are for what is filled at once and read from one end to the other: in small
    ones a core spends a tenth of its time on finding them. What fills little by little, in the steps of requests, is
    better off in small ones: a virtual machine may get the memory of a huge page as late as it is cleared, at 0.6 GB/s,
    while a step waits. numpy would ask for huge pages, for arrays of 4 MiB and more.
    """
    # Private, for shared memory has no huge pages by default.
    pages = mmap.mmap(-1, max(1, num_bytes) + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(pages, np.uint8)
    start = -address(whole) % _HUGE_PAGE
    return whole[start : start + num_bytes]
