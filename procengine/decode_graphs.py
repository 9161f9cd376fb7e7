"""`DecodeGraphs`: decode steps as graphs, one for each of a few batch sizes, for a GPU that is faster than its host.

Owns: which sizes there are, the buffers that graphs read, and what stands in rows that nobody asked for. Never does:
compute (it is given the forward pass), or know how a graph is made (`device_streams`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from procengine.device_streams import Streams
from procengine.executor import ForwardBatch

__all__ = ["DecodeGraphs", "graph_sizes"]

_MAX_ROWS = 512  # beyond, a step takes a GPU longer than its launches take the host
_STRIDE = 32


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, ... 32, 64, 96, ... up to the most rows that a step may have: never more than twice what is needed."""
    most = min(max_num_seqs, _MAX_ROWS)
    sizes = [1 << power for power in range(_STRIDE.bit_length())] + list(range(2 * _STRIDE, most, _STRIDE))
    return (*(size for size in sizes if size < most), most)


class _Graph(NamedTuple):
    inputs: Tensor  # int64 [4, size]: token ids, positions, seq_lens, slots
    replay: Callable[[], None]
    hidden: Tensor  # [size, hidden_size]


class DecodeGraphs:
    """Rows beyond a batch are *padding*: one token at position 0 of the tables' last row, all of whose entries are a
    block that no request is given. What is written there is never read by a row that counts."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        forward: Callable[[ForwardBatch[Tensor]], Tensor],
        streams: Streams,
        block_tables: Tensor,
        block_size: int,
    ) -> None:
        """`block_tables`, int32 [groups, slots + 1, blocks], is read by every step, at this place in memory."""
        self._sizes = sizes
        self._forward = forward
        self._block_tables = block_tables
        self._capacity = block_tables.shape[-1] * block_size
        padding = [[0], [0], [1], [block_tables.shape[-2] - 1]]
        self._padding = torch.tensor(padding, dtype=torch.int64, device=block_tables.device)
        # The largest first: the others find room in its memory.
        self._graphs = {size: self._capture(size, streams) for size in reversed(sizes)}

    def fits(self, batch: ForwardBatch[Tensor]) -> bool:
        """Whether there is a graph for this batch: decode rows only, not too many, all hidden states, no adapters."""
        num_rows = batch.seq_lens.shape[0]
        is_decode = batch.num_decode_rows == num_rows == batch.input_ids.shape[0] and batch.wanted is None
        is_plain = is_decode and batch.adapters is None
        return is_plain and num_rows <= self._sizes[-1] and batch.block_tables is self._block_tables

    def run(self, batch: ForwardBatch[Tensor]) -> Tensor:
        """Hidden states, [R, hidden_size], valid until the next call."""
        num_rows = batch.seq_lens.shape[0]
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        graph = self._graphs[size]
        rows = (batch.input_ids, batch.positions, batch.seq_lens, batch.slots)
        for target, values in zip(graph.inputs.unbind(), rows, strict=True):
            target[:num_rows].copy_(values)
        if num_rows < size:
            graph.inputs[:, num_rows:].copy_(self._padding)
        graph.replay()
        return graph.hidden[:num_rows]

    def _capture(self, size: int, streams: Streams) -> _Graph:
        inputs = self._padding.repeat(1, size)
        starts = torch.arange(size + 1, dtype=torch.int32, device=inputs.device)

        def work() -> Tensor:
            input_ids, positions, seq_lens, slots = inputs.unbind()
            batch = ForwardBatch(
                input_ids=input_ids,
                positions=positions,
                query_start_loc=starts,
                seq_lens=seq_lens.to(torch.int32),
                slots=slots,
                block_tables=self._block_tables,
                num_decode_rows=size,
                max_query_len=1,
                max_seq_len=self._capacity,
                wanted=None,
            )
            return self._forward(batch)

        return _Graph(inputs, *streams.capture(work))
