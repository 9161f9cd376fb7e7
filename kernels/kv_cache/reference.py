"""Writes to the paged KV cache in plain torch.

Owns: the meaning of a slot. Never does: allocate blocks or know whose they are.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["write_kv"]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value at its slot, in place.

    k, v: [T, Hkv, D]; k_cache, v_cache: [num_blocks, block_size, Hkv, D], contiguous, of k's dtype;
    slot_mapping: int64 [T], `block_id * block_size + offset`, distinct and in range.
    """
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)
