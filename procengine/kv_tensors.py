"""`KVTensors`: the keys and values of all layers, in blocks that any group of layers can have.

Owns: their memory. Never does: know which block belongs to whom; the frontend does.
"""

from __future__ import annotations

from typing import Generic

from procengine.arrays import A, Arrays, ElementType
from procengine.config import KVCacheDType, ModelConfig
from procengine.layer_groups import LayerGroups, one_group

__all__ = ["KVTensors", "kv_block_bytes", "kv_element", "kv_width"]

_ITEM_BYTES: dict[KVCacheDType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
_SCALE_BYTES = 4  # of the numbers of 8 bits that a token's key or value of one head is kept as


def kv_width(head_dim: int, dtype: KVCacheDType) -> int:
    """Elements that a token's key or value of one head takes: numbers of 8 bits have a scale with them."""
    return head_dim + _SCALE_BYTES if _ITEM_BYTES[dtype] == 1 else head_dim


def kv_element(dtype: KVCacheDType) -> ElementType:
    """What its memory is made of."""
    return "int8" if dtype == "fp8" else dtype


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: KVCacheDType, num_layers: int | None = None) -> int:
    """Bytes that one block takes over all layers, or so many, keys and values."""
    width = kv_width(config.head_dim, dtype)
    return 2 * (num_layers or config.num_layers) * block_size * config.num_kv_heads * width * _ITEM_BYTES[dtype]


class KVTensors(Generic[A]):
    """Keys and values of all layers, each [num_blocks + 1, block_size, num_kv_heads, head_dim]. Numbers of 8 bits are
    bytes, int8, and a little wider (`kv_width`): what is where in a block is between those who write and read. On the
    host they take memory page by page, as they are first written: an idle pool costs nothing. The last block,
    `scratch_block`, belongs to no request: rows that only fill up a batch write there. Layers of different groups share
    tensors, and have different blocks of them."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: KVCacheDType,
        arrays: Arrays[A],
        groups: LayerGroups | None = None,
    ) -> None:
        """`groups`: by default one of all layers."""
        shape = (num_blocks + 1, block_size, config.num_kv_heads, kv_width(config.head_dim, dtype))
        element = kv_element(dtype)
        self.dtype = dtype
        self.block_size = block_size
        self.scratch_block = num_blocks
        self.groups = groups or one_group(config.num_layers)
        keys = [arrays.new(shape, element) for _ in range(self.groups.layers_per_block)]
        values = [arrays.new(shape, element) for _ in range(self.groups.layers_per_block)]
        self.keys = [keys[place] for place in self.groups.place_of_layer]
        self.values = [values[place] for place in self.groups.place_of_layer]
