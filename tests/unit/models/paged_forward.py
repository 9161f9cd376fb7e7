"""Runs a model over a paged cache as a worker would: chunks of prompts and decode steps, several sequences at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch
from torch import Tensor

from procengine.kernels.attention import AttentionMetadata, Rotation
from procengine.models.decoder import Decoder

__all__ = ["PagedForward", "forward_whole"]


def forward_whole(model: Decoder, token_ids: list[int]) -> Tensor:
    """Logits of all positions of one sequence, float32 [T, V], without a cache."""
    length = len(token_ids)
    start = torch.tensor([0, length], dtype=torch.int32)

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        if rotation is not None:
            q, k = model.operations.apply_rope(q, k, rotation.cos, rotation.sin, rotation.positions)
        spec = model.attention[layer]
        return model.operations.varlen_attention(
            q, k, v, start, length, spec.scale, True, spec.sliding_window, spec.softcap
        )

    with torch.inference_mode():
        return model.compute_logits(model.forward(torch.tensor(token_ids), torch.arange(length), attention))


@dataclass
class PagedForward:
    """A cache of shuffled blocks and one sequence per row of `sequences`."""

    model: Decoder
    sequences: list[list[int]]
    block_size: int = 4
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.computed = [0] * len(self.sequences)
        per_row = -(-max(map(len, self.sequences)) // self.block_size)
        num_blocks = per_row * len(self.sequences)
        self.tables = torch.randperm(num_blocks).view(-1, per_row).to(torch.int32)
        shape = (num_blocks, self.block_size, self.model.num_kv_heads, self.model.head_dim)
        self.caches = [
            [torch.full(shape, torch.nan, dtype=self.model.dtype) for _ in range(2)]
            for _ in range(self.model.num_layers)
        ]

    def step(self, query_lens: dict[int, int]) -> dict[int, Tensor]:
        """Compute the next tokens of some rows; returns each row's new logits, float32 [query_len, V]."""
        rows = sorted(query_lens, key=lambda row: (query_lens[row] != 1, row))  # decode rows first
        lens = [query_lens[row] for row in rows]
        starts = [self.computed[row] for row in rows]
        for row in rows:
            self.computed[row] += query_lens[row]
        positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lens, strict=True)])
        ids = [self.sequences[row][self.computed[row] - query_lens[row] : self.computed[row]] for row in rows]
        meta = self._metadata(rows, lens, positions)
        logits = self._forward(torch.tensor(list(chain.from_iterable(ids))), positions, meta)
        return dict(zip(rows, logits.split(lens), strict=True))

    def _metadata(self, rows: list[int], lens: list[int], positions: Tensor) -> AttentionMetadata:
        tables = self.tables[rows]
        row_of_token = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lens))
        blocks = tables[row_of_token, positions // self.block_size].long()
        return AttentionMetadata(
            num_decode_rows=lens.count(1),
            query_start_loc=torch.tensor([0, *accumulate(lens)], dtype=torch.int32),
            seq_lens=torch.tensor([self.computed[row] for row in rows], dtype=torch.int32),
            block_tables=tables,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            max_query_len=max(lens),
            max_seq_len=max(self.computed[row] for row in rows),
        )

    def _forward(self, input_ids: Tensor, positions: Tensor, meta: AttentionMetadata) -> Tensor:
        ops = self.model.operations

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
            spec, (keys, values) = self.model.attention[layer], self.caches[layer]
            if rotation is None:
                ops.write_kv(k, v, keys, values, meta.slot_mapping)
            else:
                turn = (rotation.cos, rotation.sin, rotation.positions)
                q = ops.rope_and_write_kv(q, k, v, *turn, keys, values, meta.slot_mapping)
            return ops.paged_attention(q, keys, values, meta, spec.scale, spec.sliding_window, spec.softcap)

        with torch.inference_mode():
            return self.model.compute_logits(self.model.forward(input_ids, positions, attention))
