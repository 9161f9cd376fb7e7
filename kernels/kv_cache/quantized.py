"""Keys and values of 8 bits as tensors, for the paged cache of models in torch.

Owns: their layout in the memory of a cache. Never does: round, or read; `reference` and `triton` do.

Memory is given as bytes, [num_blocks, block_size, Hkv, D + 4], as the native kernels have it: each key or value of a
head has its own scale, a float32. A block holds all its numbers, [block_size, Hkv, D], and behind them its scales,
[block_size, Hkv]: so numbers begin where a GPU can read 16 bytes at once, which they would not beside their scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["KVCache", "QuantizedCache", "QuantizedKind", "numbers_and_scales", "open_cache"]

QuantizedKind = Literal["int8", "fp8"]
SCALE_BYTES = 4
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class QuantizedCache:
    """Keys, or values: scale * number.

    Attributes:
        numbers: int8 or float8_e4m3fn [num_blocks, block_size, Hkv, D], contiguous within each block.
        scales: float32 [num_blocks, block_size, Hkv], contiguous within each block.
    """

    numbers: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """[num_blocks, block_size, Hkv, D], as a cache of floats has it."""
        return self.numbers.shape


KVCache = Tensor | QuantizedCache  # keys or values of a layer, [num_blocks, block_size, Hkv, D]


def open_cache(memory: Tensor, kind: QuantizedKind) -> QuantizedCache:
    """Views of `memory`, int8 [num_blocks, block_size, Hkv, D + 4], contiguous; D a multiple of 4."""
    num_blocks, block_size, num_kv_heads, width = memory.shape
    head_dim = width - SCALE_BYTES
    blocks = memory.view(num_blocks, -1)
    end = block_size * num_kv_heads * head_dim
    numbers = blocks[:, :end].unflatten(1, (block_size, num_kv_heads, head_dim)).view(_DTYPES[kind])
    scales = blocks[:, end:].view(torch.float32).unflatten(1, (block_size, num_kv_heads))
    return QuantizedCache(numbers, scales)


def numbers_and_scales(cache: KVCache) -> tuple[Tensor, Tensor | None]:
    """The tensors of a cache; one of floats has no scales."""
    return (cache.numbers, cache.scales) if isinstance(cache, QuantizedCache) else (cache, None)
