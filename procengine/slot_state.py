"""`SlotState`: what a device remembers of each slot from step to step.

Owns: the last sampled token, the block table and the sampling values of every slot, on the device; and the request key,
on the host, for the results. Never does: decide who has a slot; the frontend's updates say so.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from procengine.step_payload import BLOCK_UPDATE_WIDTH, SLOT_ROW, join_int64

__all__ = ["SlotState"]

_COLUMN = {name: at for at, name in enumerate(SLOT_ROW)}
_REALS = ("temperature", "top_p", "min_p")


class SlotState:
    """Tables over `max_num_seqs` slots.

    Attributes:
        last_tokens: int32 [slots], the token each slot sampled last.
        block_tables: int32 [slots, max_blocks].
        reals: float32 [slots, 3]: temperature, top_p, min_p.
        top_k: int32 [slots].
        seeds: int64 [slots].
        keys: int64 [slots], on the host.
        num_logprobs: int32 [slots], on the host.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self.reals = torch.zeros((max_num_seqs, len(_REALS)), dtype=torch.float32, device=device)
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.keys = np.full(max_num_seqs, -1, np.int64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)

    def update(self, host: dict[str, NDArray[np.int32]], on_device: dict[str, Tensor]) -> None:
        """Apply the `slot_rows` and `block_updates` sections of a step; both arguments hold the same values."""
        if host["slot_rows"].size:
            self._update_slots(host["slot_rows"], on_device["slot_rows"])
        if host["block_updates"].size:
            slots, indices, blocks = on_device["block_updates"].view(-1, BLOCK_UPDATE_WIDTH).unbind(1)
            self.block_tables[slots.long(), indices.long()] = blocks

    def resolve_tokens(self, input_ids: Tensor) -> Tensor:
        """int32 [n] token ids, with each -1 - slot replaced by that slot's last token."""
        is_reference = input_ids < 0
        slots = torch.where(is_reference, -1 - input_ids, 0).long()
        return torch.where(is_reference, self.last_tokens[slots], input_ids)

    def _update_slots(self, host_rows: NDArray[np.int32], device_rows: Tensor) -> None:
        host_rows = host_rows.reshape(-1, len(SLOT_ROW))
        host_slots = host_rows[:, _COLUMN["slot"]]
        self.keys[host_slots] = join_int64(host_rows[:, _COLUMN["key_low"] : _COLUMN["key_high"] + 1].ravel())
        self.num_logprobs[host_slots] = host_rows[:, _COLUMN["num_logprobs"]]
        rows = device_rows.view(-1, len(SLOT_ROW))
        slots = rows[:, _COLUMN["slot"]].long()
        self.top_k[slots] = rows[:, _COLUMN["top_k"]]
        for at, name in enumerate(_REALS):
            self.reals[slots, at] = rows[:, _COLUMN[name]].contiguous().view(torch.float32)
        words = rows[:, _COLUMN["seed_low"] : _COLUMN["seed_high"] + 1].long()
        self.seeds[slots] = (words[:, 0] & 0xFFFFFFFF) | (words[:, 1] << 32)
