"""`SlotState`: what a device remembers of each slot from step to step.

Owns: the last sampled token, the block table and the sampling values of every slot, on the device; and the request key,
on the host, for the results. Never does: decide who has a slot; the frontend's updates say so.
"""

from __future__ import annotations

from typing import Generic

import numpy as np
from numpy.typing import NDArray

from procengine.arrays import A, Arrays
from procengine.step_payload import SLOT_ROW, SlotList, block_update_width, iter_slot_lists, join_int64

__all__ = ["SlotState"]

_COLUMN = {name: at for at, name in enumerate(SLOT_ROW)}
_REALS = ("temperature", "top_p", "min_p")


class SlotState(Generic[A]):
    """Tables over `max_num_seqs` slots.

    Attributes:
        last_tokens: int32 [slots], the token each slot sampled last.
        block_tables: int32 [groups, slots + 1, max_blocks], of each group of layers; the last row is nobody's.
        reals: float32 [slots, 3]: temperature, top_p, min_p.
        top_k: int32 [slots].
        seeds: int64 [slots].
        keys: int64 [slots], on the host.
        num_logprobs: int32 [slots], on the host.
        adapters: int32 [slots], on the host: places of LoRA adapters, -1 where there is none.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, arrays: Arrays[A], num_groups: int = 1) -> None:
        self._arrays = arrays
        self._num_groups = num_groups
        self.last_tokens = arrays.new([max_num_seqs], "int32")
        self.block_tables = arrays.new([num_groups, max_num_seqs + 1, max_blocks], "int32")
        self.reals = arrays.new([max_num_seqs, len(_REALS)], "float32")
        self.top_k = arrays.new([max_num_seqs], "int32")
        self.seeds = arrays.new([max_num_seqs], "int64")
        self.keys = np.full(max_num_seqs, -1, np.int64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.adapters = np.full(max_num_seqs, -1, np.int32)

    def forget(self) -> None:
        """No slot has a request. What the device remembers is written before it is read again."""
        self.keys[:] = -1
        self.num_logprobs[:] = -1

    def update(self, host: dict[str, NDArray[np.int32]], on_device: dict[str, A]) -> None:
        """Apply the `slot_rows` and `block_updates` sections of a step; both arguments hold the same values."""
        if host["slot_rows"].size:
            self._update_slots(host["slot_rows"], on_device["slot_rows"])
        if host["block_updates"].size:
            self._update_blocks(on_device["block_updates"])

    def _update_blocks(self, section: A) -> None:
        width = block_update_width(self._num_groups)
        slots, indices = (self._arrays.widen(section[at::width]) for at in range(2))
        for group in range(self._num_groups):
            self.block_tables[group, slots, indices] = section[2 + group :: width]

    def take_keys(self, slot_rows: NDArray[np.int32]) -> None:
        """What the host remembers of the `slot_rows` section."""
        rows = slot_rows.reshape(-1, len(SLOT_ROW))
        slots = rows[:, _COLUMN["slot"]]
        self.keys[slots] = join_int64(rows[:, _COLUMN["key_low"] : _COLUMN["key_high"] + 1].ravel())
        self.num_logprobs[slots] = rows[:, _COLUMN["num_logprobs"]]
        self.adapters[slots] = -1

    def take_adapters(self, slot_lists: NDArray[np.int32]) -> None:
        """What the `slot_lists` section says of adapters: behind `update`, if a row of the step has one."""
        for kind, slot, data in iter_slot_lists(slot_lists):
            if kind is SlotList.ADAPTER:
                self.adapters[slot] = data[0]

    def resolve_tokens(self, input_ids: A) -> A:
        """int32 [n] token ids, with each -1 - slot replaced by that slot's last token."""
        is_reference = input_ids < 0
        slots = self._arrays.widen(self._arrays.where(is_reference, -1 - input_ids, 0))
        return self._arrays.where(is_reference, self.last_tokens[slots], input_ids)

    def _update_slots(self, host_rows: NDArray[np.int32], device_rows: A) -> None:
        self.take_keys(host_rows)

        def column(name: str) -> A:
            found: A = device_rows[_COLUMN[name] :: len(SLOT_ROW)]
            return found

        slots = self._arrays.widen(column("slot"))
        self.top_k[slots] = column("top_k")
        for at, name in enumerate(_REALS):
            self.reals[slots, at] = self._arrays.as_floats(column(name))
        low, high = (self._arrays.widen(column(name)) for name in ("seed_low", "seed_high"))
        self.seeds[slots] = (low & 0xFFFFFFFF) | (high << 32)
