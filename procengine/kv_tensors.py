"""`KVTensors`: the keys and values of all layers, in blocks.

Owns: their memory. Never does: know which block belongs to whom; the frontend does.
"""

from __future__ import annotations

from typing import Generic

from procengine.arrays import A, Arrays
from procengine.config import DType, ModelConfig

__all__ = ["KVTensors", "kv_block_bytes"]

_ITEM_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: DType) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * _ITEM_BYTES[dtype]


class KVTensors(Generic[A]):
    """Keys and values of all layers, each [num_blocks + 1, block_size, num_kv_heads, head_dim]. On the host they take
    memory page by page, as they are first written: an idle pool costs nothing. The last block, `scratch_block`, belongs
    to no request: rows that only fill up a batch write there."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: DType, arrays: Arrays[A]) -> None:
        shape = (num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self.block_size = block_size
        self.scratch_block = num_blocks
        self.keys = [arrays.new(shape, dtype) for _ in range(config.num_layers)]
        self.values = [arrays.new(shape, dtype) for _ in range(config.num_layers)]
