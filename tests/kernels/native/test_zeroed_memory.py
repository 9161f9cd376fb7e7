"""Which pages memory of the native kernels is made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from procengine.host_arrays import HostArrays
from procengine.kernels.linear.packed import WeightMemory
from procengine.kernels.native.arguments import address
from procengine.kernels.native.zeroed_memory import zeroed_memory

SMAPS = Path("/proc/self/smaps")
HUGE, SMALL = "hg", "nh"  # what was advised, as the kernel shows it


def advice_at(place: int) -> str | None:
    """What the kernel was told about pages there; None if nothing."""
    is_there = False
    for line in SMAPS.read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            is_there = begin <= place < end
        elif is_there and first == "VmFlags:":
            flags = line.split()[1:]
            return next((flag for flag in (HUGE, SMALL) if flag in flags), None)
    return None


@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("num_bytes", [1, 4096, (5 << 20) + 3])
def test_memory_is_zero_whole_and_aligned(num_bytes: int, huge_pages: bool) -> None:
    memory = zeroed_memory(num_bytes, huge_pages=huge_pages)
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    assert address(memory) % 64 == 0
    memory[:] = 7
    assert (memory == 7).all()


@pytest.mark.skipif(not SMAPS.exists(), reason="there is no /proc/self/smaps")
def test_weights_are_in_huge_pages_and_a_pool_that_fills_slowly_is_not() -> None:
    memory = zeroed_memory(4 << 20, huge_pages=True)
    if advice_at(address(memory)) is None:
        pytest.skip("this kernel has no huge pages")
    weights = WeightMemory(8 << 20).take(64)
    pool = HostArrays().new((8, 1 << 20), "int8")  # numpy would ask for huge pages
    assert advice_at(address(weights)) == HUGE
    assert advice_at(address(pool)) == SMALL
    assert pool.dtype == np.int8
