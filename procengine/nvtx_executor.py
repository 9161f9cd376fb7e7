"""`NvtxExecutor`: an executor whose calls are ranges in what Nsight Systems shows (`--nvtx`).

Owns: their names. Never does: cost anything where nobody asked for it: then there is none.
"""

from __future__ import annotations

from torch import Tensor
from torch.cuda import nvtx

from procengine.executor import Executor, ForwardBatch
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures

__all__ = ["NvtxExecutor"]


class NvtxExecutor:
    """Executor[Tensor]."""

    def __init__(self, executor: Executor[Tensor]) -> None:
        self._executor = executor

    def prepare(self, block_tables: Tensor) -> None:
        with nvtx.range("prepare"):
            self._executor.prepare(block_tables)

    def forward(self, batch: ForwardBatch[Tensor]) -> Tensor:
        rows, tokens = batch.seq_lens.shape[0], batch.input_ids.shape[0]
        with nvtx.range(f"forward {tokens} tokens of {rows} rows, {batch.num_decode_rows} decode"):
            return self._executor.forward(batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        with nvtx.range("logits"):
            return self._executor.compute_logits(hidden)

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        with nvtx.range("greedy"):
            return self._executor.greedy_tokens(hidden)

    def sample(self, logits: Tensor, columns: SamplingColumns[Tensor], features: SamplingFeatures) -> Tensor:
        with nvtx.range("sample"):
            return self._executor.sample(logits, columns, features)
