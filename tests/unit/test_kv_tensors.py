"""What a block of the KV cache takes, by number format."""

from __future__ import annotations

from procengine.config import KVCacheDType
from procengine.host_arrays import HostArray, HostArrays
from procengine.kv_tensors import KVTensors, kv_block_bytes
from tests.model_configs import SMOLLM2


def test_blocks_take_the_bytes_that_they_are_counted_for() -> None:
    config = SMOLLM2
    dtypes: tuple[KVCacheDType, ...] = ("float32", "bfloat16", "int8", "fp8")
    for dtype in dtypes:
        cache: KVTensors[HostArray] = KVTensors(config, 5, 16, dtype, HostArrays())
        total = sum(array.nbytes for array in (*cache.keys, *cache.values))
        assert total == cache.keys[0].shape[0] * kv_block_bytes(config, 16, dtype)
