"""`OpenSequence`: a sequence that is too long for one step, between its pieces.

Owns: its keys and values, and what its pieces gave. Never does: take blocks of the KV pool, which the frontend gives
out: its memory is its own and goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from procengine.arrays import A
from procengine.config import EngineConfig
from procengine.executor import ForwardBatch, Model
from procengine.kv_tensors import KVTensors

__all__ = ["OpenSequence"]

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


class OpenSequence(Generic[A]):
    """`forward` is for the device loop; waiting for what pieces gave, in their order, for any one thread."""

    def __init__(self, model: Model[A], config: EngineConfig, num_tokens: int, *, overlaps: bool) -> None:
        block_size = config.cache.block_size
        num_blocks = -(-num_tokens // block_size)
        self._arrays = model.arrays
        self._executor = model.open(
            KVTensors(config.model, num_blocks, block_size, config.worker.kv_cache_dtype, model.arrays)
        )
        table = np.arange(num_blocks, dtype=np.int32)
        tables = np.stack([table, table])[None]  # of all layers, which are one group; the last row is nobody's
        self._block_tables = self._arrays.send(tables)
        self._slots = self._arrays.send(np.zeros(1, np.int64))
        self._num_tokens = num_tokens
        self._num_done = 0
        self._overlaps = overlaps
        self._last: tuple[A, Int32s] | None = None  # state and id of the newest token
        self._parts: list[Float32s] = []
        self.num_kept = 0  # numbers in the parts, once they have come

    @property
    def is_through(self) -> bool:
        """Whether that was the last piece."""
        return self._num_done == self._num_tokens

    def forward(self, input_ids: A, positions: A, host_ids: Int32s) -> tuple[A, Int32s]:
        """Hidden states [n, hidden_size] and ids int32 [n] of the next piece; of the token before it too, if pieces
        overlap. input_ids: int32; positions: int64; host_ids: the same ids on the host."""
        arrays, count = self._arrays, len(host_ids)
        self._num_done += count
        hidden = self._executor.forward(
            ForwardBatch(
                input_ids=input_ids,
                positions=positions,
                query_start_loc=arrays.send(np.array([0, count], np.int32)),
                seq_lens=arrays.send(np.array([self._num_done], np.int32)),
                slots=self._slots,
                block_tables=self._block_tables,
                num_decode_rows=0,
                max_query_len=count,
                max_seq_len=self._num_done,
                wanted=None,
            )
        )
        before, self._last = self._last, (hidden[-1:], host_ids[-1:])
        if before is None or not self._overlaps:
            return hidden, host_ids
        return arrays.concatenate([before[0], hidden], 0), np.concatenate([before[1], host_ids])

    def keep(self, wait: Callable[[], Float32s], count: int) -> Callable[[], Float32s]:
        """To be waited for in place of `wait`: its first `count` numbers are kept, and none are sent."""
        self.num_kept += count

        def wait_and_keep() -> Float32s:
            self._parts.append(wait().ravel()[:count])
            return np.empty(0, np.float32)

        return wait_and_keep

    def joined(self, last: Float32s) -> Float32s:
        """What was kept, and what the last piece gave."""
        return np.concatenate([*self._parts, last.ravel()])
