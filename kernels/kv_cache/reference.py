"""Writes to the paged KV cache in plain torch.

Owns: the meaning of a slot. Never does: allocate blocks or know whose they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["quantize", "write_kv"]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value at its slot, in place.

    k, v: [T, Hkv, D]; k_cache, v_cache: [num_blocks, block_size, Hkv, D], contiguous, of k's dtype;
    slot_mapping: int64 [T], `block_id * block_size + offset`, distinct and in range.
    """
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


def quantize(heads: Tensor) -> tuple[Tensor, Tensor]:
    """What an int8 cache keeps of keys and values, and what queries are rounded to when they meet it.

    heads: [..., D]. Returns int8 [..., D] in -127 .. 127 and their scales, float32 [..., 1]: heads = scale * integers.
    """
    peak = heads.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > 1e-30, torch.full_like(peak, 127) / peak, 0)
    return (heads.float() * inverse).round().to(torch.int8), peak / 127
