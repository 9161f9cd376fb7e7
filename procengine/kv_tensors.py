"""`KVTensors`: the keys and values of all layers, in blocks.

Owns: their memory. Never does: know which block belongs to whom; the frontend does.
"""

from __future__ import annotations

from typing import Generic

from procengine.arrays import A, Arrays
from procengine.config import KVCacheDType, ModelConfig

__all__ = ["KVTensors", "kv_block_bytes", "kv_width"]

_ITEM_BYTES: dict[KVCacheDType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_SCALE_BYTES = 4  # of the integers that a token's key or value of one head is kept as


def kv_width(head_dim: int, dtype: KVCacheDType) -> int:
    """Elements that a token's key or value of one head takes: integers have a scale with them."""
    return head_dim + _SCALE_BYTES if dtype == "int8" else head_dim


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: KVCacheDType) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    width = kv_width(config.head_dim, dtype)
    return 2 * config.num_layers * block_size * config.num_kv_heads * width * _ITEM_BYTES[dtype]


class KVTensors(Generic[A]):
    """Keys and values of all layers, each [num_blocks + 1, block_size, num_kv_heads, head_dim] (as int8 a little wider,
    see `kv_width`). On the host they take memory page by page, as they are first written: an idle pool costs nothing.
    The last block, `scratch_block`, belongs to no request: rows that only fill up a batch write there."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: KVCacheDType, arrays: Arrays[A]
    ) -> None:
        shape = (num_blocks + 1, block_size, config.num_kv_heads, kv_width(config.head_dim, dtype))
        self.block_size = block_size
        self.scratch_block = num_blocks
        self.keys = [arrays.new(shape, dtype) for _ in range(config.num_layers)]
        self.values = [arrays.new(shape, dtype) for _ in range(config.num_layers)]
