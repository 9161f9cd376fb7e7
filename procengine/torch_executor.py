"""The model in torch: on a GPU, in float32, and wherever the native kernels cannot run.

Owns: what attention must know of a batch. Never does: arithmetic; that is in `models` and `kernels`.
"""

from __future__ import annotations

import logging
import time
from typing import cast

import torch
from torch import Tensor

from procengine.decode_graphs import DecodeGraphs
from procengine.device_streams import Streams
from procengine.executor import Executor, ForwardBatch
from procengine.kernels.attention import AttentionMetadata, Rotation
from procengine.kernels.kv_cache.quantized import KVCache, open_cache
from procengine.kernels.lora import AdapterBlocks
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures
from procengine.kv_tensors import KVTensors
from procengine.models.decoder import AdaptedDecoder, AttentionCallback, Decoder
from procengine.models.lora_bank import LoraBank
from procengine.nvtx_executor import NvtxExecutor
from procengine.torch_arrays import TorchArrays
from procengine.warm_up import warm_up

__all__ = ["TorchExecutor", "TorchModel"]

logger = logging.getLogger(__name__)


class TorchModel:
    """A `Decoder` as runners see it. `graph_sizes`: decode batches that are captured as graphs (`decode_graphs`)."""

    def __init__(
        self, model: Decoder, graph_sizes: tuple[int, ...] = (), *, nvtx: bool = False, bank: LoraBank | None = None
    ) -> None:
        self.model = model
        self._nvtx = nvtx
        self.graph_sizes = graph_sizes
        self.bank = bank
        self.arrays = TorchArrays(model.device, model.operations)
        names = {f"{name}_backend": backend for name, backend in model.operations.names.items()}
        self.facts: dict[str, int | float | str] = {"kernels": "torch", **names, "quantization": model.quantization}
        if bank is not None:
            self.facts["lora_mb"] = round(bank.num_bytes / 1e6, 1)

    def open(self, cache: KVTensors[Tensor]) -> Executor[Tensor]:
        executor = TorchExecutor(self.model, cache, self.arrays.streams, self.graph_sizes, self.bank)
        return NvtxExecutor(executor) if self._nvtx else executor

    def encode(
        self,
        input_ids: Tensor,
        positions: Tensor,
        query_start_loc: Tensor,
        max_query_len: int,
        num_layers: int | None = None,
        adapters: AdapterBlocks[Tensor] | None = None,
    ) -> Tensor:
        model, ops = self.model, self.model.operations

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
            if rotation is not None:
                q, k = ops.apply_rope(q, k, rotation.cos, rotation.sin, rotation.positions)
            spec = model.attention[layer]
            return ops.varlen_attention(
                q, k, v, query_start_loc, max_query_len, spec.scale, spec.is_causal, spec.sliding_window, spec.softcap
            )

        return _forward(model, self.bank, input_ids, positions, attend, adapters, num_layers)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.model.compute_logits(hidden)


def _forward(
    model: Decoder,
    bank: LoraBank | None,
    input_ids: Tensor,
    positions: Tensor,
    attention: AttentionCallback,
    adapters: AdapterBlocks[Tensor] | None,
    num_layers: int | None = None,
) -> Tensor:
    if adapters is None:
        return model.forward(input_ids, positions, attention, num_layers)
    assert bank is not None, "tokens have adapters, and there is room for none"
    adapted = cast(AdaptedDecoder, model)  # what has a bank is one
    return adapted.forward(input_ids, positions, attention, num_layers, bank.during(adapters))


def _open(cache: KVTensors[Tensor], layers: list[Tensor]) -> list[KVCache]:
    """Keys or values of each layer, as attention takes them."""
    if cache.dtype in ("int8", "fp8"):
        return [open_cache(memory, cache.dtype) for memory in layers]
    return list(layers)


class TorchExecutor:
    """An Executor, operation by operation."""

    def __init__(
        self,
        model: Decoder,
        cache: KVTensors[Tensor],
        streams: Streams,
        graph_sizes: tuple[int, ...],
        bank: LoraBank | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._keys, self._values = _open(cache, cache.keys), _open(cache, cache.values)
        self._streams = streams
        self._graph_sizes = graph_sizes
        self._bank = bank
        self._graphs: DecodeGraphs | None = None

    def prepare(self, block_tables: Tensor) -> None:
        block_tables[:, -1] = self._cache.scratch_block
        if "triton" in self._model.operations.names.values():
            started = time.monotonic()
            warm_up(self._model, self._compute, block_tables, self._cache.block_size)
            logger.info("compiled or found kernels in %.1f s", time.monotonic() - started)
        if self._graph_sizes:
            started = time.monotonic()
            logger.info(
                "capturing graphs of %d decode batches, up to %d rows", len(self._graph_sizes), max(self._graph_sizes)
            )
            self._graphs = DecodeGraphs(
                self._graph_sizes, self._compute, self._streams, block_tables, self._cache.block_size
            )
            logger.info("captured graphs in %.1f s", time.monotonic() - started)

    def forward(self, batch: ForwardBatch[Tensor]) -> Tensor:
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch)
        return self._compute(batch)

    def _compute(self, batch: ForwardBatch[Tensor]) -> Tensor:
        attention = self._attention(self._metadata(batch))
        hidden = _forward(self._model, self._bank, batch.input_ids, batch.positions, attention, batch.adapters)
        return hidden if batch.wanted is None else hidden[batch.wanted]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        return self.compute_logits(hidden).argmax(dim=-1).to(torch.int32)

    def sample(self, logits: Tensor, columns: SamplingColumns[Tensor], features: SamplingFeatures) -> Tensor:
        return self._model.operations.sample(logits, columns, features)

    def _metadata(self, batch: ForwardBatch[Tensor]) -> list[AttentionMetadata]:
        """For each group of layers: they differ in their blocks."""
        block_size = self._cache.block_size
        num_tokens, num_rows = batch.input_ids.shape[0], batch.seq_lens.shape[0]
        token_slots = batch.slots
        if num_tokens != num_rows:
            lengths = batch.query_start_loc.diff()
            token_slots = torch.repeat_interleave(batch.slots, lengths, output_size=num_tokens)
        indices, offsets = batch.positions // block_size, batch.positions % block_size
        return [
            AttentionMetadata(
                num_decode_rows=batch.num_decode_rows,
                query_start_loc=batch.query_start_loc,
                seq_lens=batch.seq_lens,
                block_tables=table[batch.slots],  # whole: what attention does with a row depends on no other
                slot_mapping=table[token_slots, indices].long() * block_size + offsets,
                max_query_len=batch.max_query_len,
                max_seq_len=batch.max_seq_len,
            )
            for table in batch.block_tables
        ]

    def _attention(self, metadata: list[AttentionMetadata]) -> AttentionCallback:
        groups, model, ops = self._cache.groups, self._model, self._model.operations

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
            spec, keys, values = model.attention[layer], self._keys[layer], self._values[layer]
            meta = metadata[groups.group_of_layer[layer]]
            # All rows write before any row reads: a block may be shared in the very step that fills it.
            if rotation is None:
                ops.write_kv(k, v, keys, values, meta.slot_mapping)
            else:
                turn = (rotation.cos, rotation.sin, rotation.positions)
                q = ops.rope_and_write_kv(q, k, v, *turn, keys, values, meta.slot_mapping)
            return ops.paged_attention(q, keys, values, meta, spec.scale, spec.sliding_window, spec.softcap)

        return attend
