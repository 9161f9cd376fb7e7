"""Writes to the paged KV cache in Triton.

Owns: the kernel and its launch. Never does: allocate blocks or know whose they are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["write_kv"]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """As the reference; k and v may be slices of the fused projection."""
    size = k.shape[1] * k.shape[2]
    assert k.stride()[1:] == v.stride()[1:] == (k.shape[2], 1)
    if k.shape[0]:
        _write_kv_kernel[(k.shape[0],)](
            k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0), size, BLOCK=triton.next_power_of_2(size)
        )


@triton.jit
def _write_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < size
    tl.store(k_cache + slot * size + columns, tl.load(k + token * k_stride + columns, mask=is_inside), mask=is_inside)
    tl.store(v_cache + slot * size + columns, tl.load(v + token * v_stride + columns, mask=is_inside), mask=is_inside)
