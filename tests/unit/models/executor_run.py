"""Runs an executor as a worker would: chunks of prompts and decodes, several sequences at once, shuffled blocks."""

from __future__ import annotations

from itertools import accumulate, chain

import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.executor import ForwardBatch, Model
from procengine.kv_tensors import KVTensors

__all__ = ["ExecutorRun"]


class ExecutorRun:
    """One sequence per row of `sequences`, and what has been computed of each."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        sequences: list[list[int]],
        *,
        block_size: int = 4,
        kv_dtype: torch.dtype = torch.float32,
        poisoned: bool = True,
    ) -> None:
        self._sequences = sequences
        per_row = -(-max(map(len, sequences)) // block_size)
        num_blocks = per_row * len(sequences)
        cache = KVTensors(config, num_blocks, block_size, kv_dtype, torch.device("cpu"))
        if poisoned:  # what nobody wrote must not be read
            for tensor in (*cache.keys, *cache.values):
                tensor.fill_(torch.nan)
        self.tables = torch.randperm(num_blocks).view(-1, per_row).to(torch.int32)
        self.computed = [0] * len(sequences)
        self.executor = model.open(cache)

    def step(self, query_lens: dict[int, int], wanted: list[int] | None = None) -> Tensor:
        """Compute the next tokens of some rows, decode rows first; hidden states of all, or of the tokens `wanted`."""
        rows = sorted(query_lens, key=lambda row: (query_lens[row] != 1, row))
        lens = [query_lens[row] for row in rows]
        starts = [self.computed[row] for row in rows]
        for row in rows:
            self.computed[row] += query_lens[row]
        positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lens, strict=True)])
        ids = [self._sequences[row][self.computed[row] - query_lens[row] : self.computed[row]] for row in rows]
        batch = ForwardBatch(
            input_ids=torch.tensor(list(chain.from_iterable(ids)), dtype=torch.int32),
            positions=positions,
            query_start_loc=torch.tensor([0, *accumulate(lens)], dtype=torch.int32),
            seq_lens=torch.tensor([self.computed[row] for row in rows], dtype=torch.int32),
            slots=torch.tensor(rows),
            block_tables=self.tables,
            num_decode_rows=lens.count(1),
            max_query_len=max(lens),
            max_seq_len=max(self.computed[row] for row in rows),
            wanted=None if wanted is None else torch.tensor(wanted, dtype=torch.int64),
        )
        with torch.inference_mode():
            return self.executor.forward(batch)

    def logits(self, query_lens: dict[int, int]) -> dict[int, Tensor]:
        """The same, as each row's new logits, float32 [query_len, V]."""
        rows = sorted(query_lens, key=lambda row: (query_lens[row] != 1, row))
        hidden = self.step(query_lens)
        with torch.inference_mode():
            logits = self.executor.compute_logits(hidden)
        return dict(zip(rows, logits.split([query_lens[row] for row in rows]), strict=True))

    def run(self, plan: list[dict[int, int]]) -> list[Tensor]:
        """All logits of each sequence, computed in the steps of `plan`."""
        found: list[list[Tensor]] = [[] for _ in self._sequences]
        for query_lens in plan:
            for row, logits in self.logits(query_lens).items():
                found[row].append(logits)
        return [torch.cat(parts) if parts else torch.empty(0) for parts in found]
