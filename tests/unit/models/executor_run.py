"""Runs an executor as a worker would: chunks of prompts and decodes, several sequences at once, shuffled blocks."""

from __future__ import annotations

from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from procengine.config import KVCacheDType, ModelConfig
from procengine.executor import ForwardBatch, Model
from procengine.kv_tensors import KVTensors

__all__ = ["ExecutorRun"]


class ExecutorRun:
    """One sequence per row of `sequences`, and what has been computed of each."""

    def __init__(
        self,
        model: Model[Any],
        config: ModelConfig,
        sequences: list[list[int]],
        *,
        block_size: int = 4,
        kv_dtype: KVCacheDType = "float32",
        poisoned: bool = True,
    ) -> None:
        self._sequences = sequences
        per_row = -(-max(map(len, sequences)) // block_size)
        num_blocks = per_row * len(sequences)
        self._arrays = model.arrays
        cache: KVTensors[Any] = KVTensors(config, num_blocks, block_size, kv_dtype, self._arrays)
        if poisoned:  # what nobody wrote must not be read
            nan = {np.dtype(np.uint16): 0x7FC0, np.dtype(np.int8): -1, torch.int8: -1}.get(
                cache.keys[0].dtype, torch.nan
            )
            for array in (*cache.keys, *cache.values):
                array[:] = nan
        self.tables = np.random.default_rng(0).permutation(num_blocks).reshape(-1, per_row).astype(np.int32)
        self.computed = [0] * len(sequences)
        self.executor = model.open(cache)

    def step(self, query_lens: dict[int, int], wanted: list[int] | None = None) -> Tensor:
        """Compute the next tokens of some rows, decode rows first; hidden states of all, or of the tokens `wanted`."""
        rows = sorted(query_lens, key=lambda row: (query_lens[row] != 1, row))
        lens = [query_lens[row] for row in rows]
        starts = [self.computed[row] for row in rows]
        for row in rows:
            self.computed[row] += query_lens[row]
        positions = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lens, strict=True)])
        ids = [self._sequences[row][self.computed[row] - query_lens[row] : self.computed[row]] for row in rows]
        send = self._arrays.send
        batch: ForwardBatch[Any] = ForwardBatch(
            input_ids=send(np.array(list(chain.from_iterable(ids)), np.int32)),
            positions=send(positions),
            query_start_loc=send(np.array([0, *accumulate(lens)], np.int32)),
            seq_lens=send(np.array([self.computed[row] for row in rows], np.int32)),
            slots=send(np.array(rows, np.int64)),
            block_tables=send(self.tables[None]),
            num_decode_rows=lens.count(1),
            max_query_len=max(lens),
            max_seq_len=max(self.computed[row] for row in rows),
            wanted=None if wanted is None else send(np.array(wanted, np.int64)),
        )
        with torch.inference_mode():
            return torch.as_tensor(self.executor.forward(batch))

    def logits(self, query_lens: dict[int, int]) -> dict[int, Tensor]:
        """The same, as each row's new logits, float32 [query_len, V]."""
        rows = sorted(query_lens, key=lambda row: (query_lens[row] != 1, row))
        hidden = self.step(query_lens)
        logits = self.head(hidden)
        return dict(zip(rows, logits.split([query_lens[row] for row in rows]), strict=True))

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        with torch.inference_mode():
            return torch.as_tensor(self.executor.compute_logits(self._arrays.send(hidden.numpy())))

    def run(self, plan: list[dict[int, int]]) -> list[Tensor]:
        """All logits of each sequence, computed in the steps of `plan`."""
        found: list[list[Tensor]] = [[] for _ in self._sequences]
        for query_lens in plan:
            for row, logits in self.logits(query_lens).items():
                found[row].append(logits)
        return [torch.cat(parts) if parts else torch.empty(0) for parts in found]
