"""Rotary position embedding in plain torch, and the write of keys and values to the cache that follows it.

Owns: the arithmetic other backends are tested against. Never does: make the tables, or change q, k or v in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from procengine.kernels.kv_cache.quantized import KVCache
from procengine.kernels.kv_cache.reference import write_kv

__all__ = ["apply_rope", "rope_and_write_kv"]


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions (Su et al. 2021, arXiv:2104.09864).

    q: [T, H, D], k: [T, Hkv, D]; cos, sin: float32 [max_len, D/2]; positions: int32 or int64 [T], below max_len.
    Half-split pairs: dimension i turns with i + D/2. Computed in float32, returned in the dtype of q and k.
    """
    cos_rows = cos.index_select(0, positions).unsqueeze(1)
    sin_rows = sin.index_select(0, positions).unsqueeze(1)
    return _rotate(q, cos_rows, sin_rows), _rotate(k, cos_rows, sin_rows)


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    slot_mapping: Tensor,
) -> Tensor:
    """The rotated queries, [T, H, D]; rotated keys, and values, are stored at their slots (`write_kv`)."""
    q, k = apply_rope(q, k, cos, sin, positions)
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
