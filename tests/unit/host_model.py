"""A model in torch and float32 behind numpy arrays: what runners without torch are given, with logits that an oracle
agrees with to the last token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from procengine.executor import Executor, ForwardBatch
from procengine.host_arrays import HostArray, HostArrays
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures
from procengine.kernels.sampling.native import sample
from procengine.kv_tensors import KVTensors
from procengine.torch_executor import TorchModel

__all__ = ["HostModel"]

_ON_DEVICE = ("input_ids", "positions", "query_start_loc", "seq_lens", "slots", "block_tables")


class HostModel:
    """A `TorchModel` as a `Model[HostArray]`."""

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        self.arrays = HostArrays()
        self.facts = model.facts

    def open(self, cache: KVTensors[HostArray]) -> HostExecutor:
        tensors: KVTensors[Tensor] = KVTensors.__new__(KVTensors)
        tensors.dtype = cache.dtype
        tensors.block_size, tensors.groups = cache.block_size, cache.groups
        tensors.keys, tensors.values = (
            [torch.from_numpy(array) for array in arrays] for arrays in (cache.keys, cache.values)
        )
        return HostExecutor(self._model.open(tensors))

    def encode(
        self,
        input_ids: HostArray,
        positions: HostArray,
        query_start_loc: HostArray,
        max_query_len: int,
        num_layers: int | None = None,
    ) -> HostArray:
        own, at, bounds = (torch.from_numpy(array) for array in (input_ids, positions, query_start_loc))
        with torch.inference_mode():
            hidden: HostArray = self._model.encode(own, at, bounds, max_query_len, num_layers).numpy()
        return hidden

    def compute_logits(self, hidden: HostArray) -> HostArray:
        with torch.inference_mode():
            logits: HostArray = self._model.compute_logits(torch.from_numpy(hidden)).numpy()
        return logits


class HostExecutor:
    """The forward pass by torch, all else as in a native worker."""

    def __init__(self, executor: Executor[Tensor]) -> None:
        self._executor = executor

    def prepare(self, block_tables: HostArray) -> None:
        return

    def forward(self, batch: ForwardBatch[HostArray]) -> HostArray:
        own: dict[str, Any] = {name: torch.from_numpy(getattr(batch, name)) for name in _ON_DEVICE}
        own |= {name: getattr(batch, name) for name in ("num_decode_rows", "max_query_len", "max_seq_len")}
        wanted = None if batch.wanted is None else torch.from_numpy(batch.wanted)
        with torch.inference_mode():
            hidden: HostArray = self._executor.forward(ForwardBatch(**own, wanted=wanted)).numpy()
        return hidden

    def compute_logits(self, hidden: HostArray) -> HostArray:
        with torch.inference_mode():
            logits: HostArray = self._executor.compute_logits(torch.from_numpy(hidden)).numpy()
        return logits

    def greedy_tokens(self, hidden: HostArray) -> NDArray[np.int32]:
        tokens: NDArray[np.int32] = self.compute_logits(hidden).argmax(axis=1).astype(np.int32)
        return tokens

    def sample(
        self, logits: HostArray, columns: SamplingColumns[HostArray], features: SamplingFeatures
    ) -> NDArray[np.int32]:
        return sample(logits, columns, features)
