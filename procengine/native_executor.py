"""The model in the native library: a forward pass is one call, and its head another.

Owns: how a batch and a cache are handed over. Never does: arithmetic, or read weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from procengine.executor import ForwardBatch
from procengine.kernels.decoder.native import Decoder, PagedTensors
from procengine.kernels.native import library
from procengine.kv_tensors import KVTensors

__all__ = ["NativeExecutor", "NativeModel"]


class NativeModel:
    """A `Decoder` as runners see it."""

    def __init__(self, decoder: Decoder, num_layers: int, kv_dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._num_layers = num_layers
        self._kv_dtype = kv_dtype
        self.facts: dict[str, int | float | str] = {
            "kernels": "native",
            "quantization": "+".join(decoder.formats),
            "isa": library.best_isa().name.lower(),
        }

    def open(self, cache: KVTensors) -> NativeExecutor:
        return NativeExecutor(self._decoder, PagedTensors(cache.keys, cache.values, cache.block_size))

    def encode(self, input_ids: Tensor, positions: Tensor, query_start_loc: Tensor, max_query_len: int) -> Tensor:
        """All layers share one piece of memory, for what a layer wrote is of no use to the next. In it a sequence is a
        block without end, whose number is that of its first token."""
        sizes = self._decoder.sizes
        shape = (input_ids.shape[0], 1, sizes.num_kv_heads, sizes.head_dim)
        keys, values = (torch.empty(shape, dtype=self._kv_dtype) for _ in range(2))
        packed = PagedTensors([keys] * self._num_layers, [values] * self._num_layers, PagedTensors.ENDLESS)
        return self._decoder.bind(packed).forward(
            input_ids,
            query_start_loc,
            query_start_loc.diff(),
            torch.arange(query_start_loc.shape[0] - 1),
            query_start_loc[:-1].unsqueeze(1),
            max_query_len,
            None,
        )


class NativeExecutor:
    """An Executor in one call."""

    def __init__(self, decoder: Decoder, cache: PagedTensors) -> None:
        self._decoder = decoder
        self._bound = decoder.bind(cache)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._bound.forward(
            batch.input_ids,
            batch.query_start_loc,
            batch.seq_lens,
            batch.slots,
            batch.block_tables,
            batch.max_seq_len,
            batch.wanted,
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.compute_logits(hidden)

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        return self._decoder.greedy_tokens(hidden)
