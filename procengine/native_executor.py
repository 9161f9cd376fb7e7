"""The model in the native library: a forward pass is one call, and its head another.

Owns: how a batch and a cache are handed over. Never does: arithmetic, read weights, or load torch.
"""

from __future__ import annotations

import numpy as np

from procengine.config import KVCacheDType
from procengine.executor import ForwardBatch
from procengine.host_arrays import HostArray, HostArrays
from procengine.kernels.decoder.native import BoundDecoder, Decoder
from procengine.kernels.native import library
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures
from procengine.kernels.sampling.native import sample
from procengine.kv_tensors import KVTensors, kv_element, kv_width

__all__ = ["NativeExecutor", "NativeModel"]

_ENCODE_BLOCK_SIZE = 64  # tokens


class NativeModel:
    """A `Decoder` as runners see it."""

    def __init__(self, decoder: Decoder, num_layers: int, kv_dtype: KVCacheDType) -> None:
        self.arrays = HostArrays()
        self._decoder = decoder
        self._num_layers = num_layers
        self._kv_dtype = kv_dtype
        self.facts: dict[str, int | float | str] = {
            "kernels": "native",
            "quantization": "+".join(decoder.formats),
            "weights_mb": round(decoder.num_bytes / 1e6, 1),
            "isa": library.best_isa().name.lower(),
        }

    def open(self, cache: KVTensors[HostArray]) -> NativeExecutor:
        assert cache.groups.num_groups == 1, "these kernels read one block table"
        return NativeExecutor(self._decoder, self._decoder.bind(cache.keys, cache.values))

    def encode(
        self,
        input_ids: HostArray,
        positions: HostArray,
        query_start_loc: HostArray,
        max_query_len: int,
        num_layers: int | None = None,
    ) -> HostArray:
        """Each sequence has blocks of its own, one behind the other. All layers use the same ones, for what a layer
        wrote is of no use to the next."""
        sizes = self._decoder.sizes
        lengths = np.diff(query_start_loc)
        num_blocks = (lengths + _ENCODE_BLOCK_SIZE - 1) // _ENCODE_BLOCK_SIZE
        first_blocks = num_blocks.cumsum(dtype=np.int32) - num_blocks
        most = -(-max_query_len // _ENCODE_BLOCK_SIZE)
        width = kv_width(sizes.head_dim, self._kv_dtype)
        shape = (int(num_blocks.sum()), _ENCODE_BLOCK_SIZE, sizes.num_kv_heads, width)
        keys, values = (self.arrays.new(shape, kv_element(self._kv_dtype)) for _ in range(2))
        return self._decoder.bind([keys] * self._num_layers, [values] * self._num_layers).forward(
            input_ids,
            query_start_loc,
            lengths,
            np.arange(lengths.shape[0], dtype=np.int64),
            first_blocks[:, None] + np.arange(most, dtype=np.int32),
            max_query_len,
            None,
            num_layers,
        )

    def compute_logits(self, hidden: HostArray) -> HostArray:
        return self._decoder.compute_logits(np.ascontiguousarray(hidden))


class NativeExecutor:
    """An Executor in one call."""

    def __init__(self, decoder: Decoder, bound: BoundDecoder) -> None:
        self._decoder = decoder
        self._bound = bound

    def prepare(self, block_tables: HostArray) -> None:
        return

    def forward(self, batch: ForwardBatch[HostArray]) -> HostArray:
        return self._bound.forward(
            batch.input_ids,
            batch.query_start_loc,
            batch.seq_lens,
            batch.slots,
            batch.block_tables[0],
            batch.max_seq_len,
            batch.wanted,
        )

    def compute_logits(self, hidden: HostArray) -> HostArray:
        return self._decoder.compute_logits(hidden)

    def greedy_tokens(self, hidden: HostArray) -> HostArray:
        return self._decoder.greedy_tokens(hidden)

    def sample(self, logits: HostArray, columns: SamplingColumns[HostArray], features: SamplingFeatures) -> HostArray:
        return sample(logits, columns, features)
