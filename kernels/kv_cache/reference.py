"""Writes to the paged KV cache in plain torch, and reads from it.

Owns: the meaning of a slot, and of numbers of 8 bits. Never does: allocate blocks or know whose they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from procengine.kernels.kv_cache.quantized import KVCache, QuantizedCache

__all__ = ["quantize", "read_blocks", "write_kv"]

# The largest number of a format. Of e4m3 that is its largest finite one (Micikevicius et al. 2022, arXiv:2209.05433).
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def write_kv(k: Tensor, v: Tensor, k_cache: KVCache, v_cache: KVCache, slot_mapping: Tensor) -> None:
    """Store each token's key and value at its slot, in place.

    k, v: [T, Hkv, D]; k_cache, v_cache: [num_blocks, block_size, Hkv, D], contiguous, of k's dtype, or quantised;
    slot_mapping: int64 [T], `block_id * block_size + offset`, distinct and in range.
    """
    _write(k, k_cache, slot_mapping)
    _write(v, v_cache, slot_mapping)


def read_blocks(cache: KVCache, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies of blocks, [n, block_size, Hkv, D]; quantised ones as floats of `dtype`. blocks: int32 [n]."""
    if not isinstance(cache, QuantizedCache):
        return cache.index_select(0, blocks)
    numbers = cache.numbers.view(torch.int8).index_select(0, blocks).view(cache.numbers.dtype)
    return (numbers.float() * cache.scales.index_select(0, blocks).unsqueeze(-1)).to(dtype)


def quantize(heads: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """What a cache of 8 bits keeps of keys and values. (And what queries are rounded to when natively they meet it.)

    heads: [..., D]. Returns numbers [..., D] of `dtype`, int8 in -127 .. 127 or float8_e4m3fn, and their scales,
    float32 [..., 1]: heads = scale * numbers.
    """
    largest = _LARGEST[dtype]
    peak = heads.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > 1e-30, torch.full_like(peak, largest) / peak, 0)
    scaled = heads.float() * inverse
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), peak / largest


def _write(heads: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    if not isinstance(cache, QuantizedCache):
        cache.flatten(0, 1).index_copy_(0, slot_mapping, heads)
        return
    numbers, scales = quantize(heads, cache.numbers.dtype)
    block_size = cache.shape[1]
    place = (slot_mapping // block_size, slot_mapping % block_size)
    cache.numbers.view(torch.int8)[place] = numbers.view(torch.int8)
    cache.scales[place] = scales.squeeze(-1)
