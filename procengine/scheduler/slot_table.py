"""`SlotTable`: the state of all resident requests of one worker, as arrays indexed by slot.

Owns: token histories, counters, limits and block tables of running requests. Never does: decide anything.
A steady decode step touches these arrays with a handful of vector operations; nothing is kept a request in Python.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.request import NO_SLOT, Request
from procengine.stopping import NO_TOKEN, FinishLimits

__all__ = ["VACANT", "SlotTable", "Slots"]

VACANT = -1  # key of a slot nobody holds

Slots = NDArray[np.intp]  # what numpy indexes with: other integers are converted at each use
_NO_BLOCKS = np.zeros(0, np.int32)


class SlotTable:
    """Arrays over `max_num_seqs` slots.

    Attributes:
        keys: int64, the request in each slot, VACANT if none.
        num_tokens: int32, confirmed tokens (prompt and results that came back).
        num_computed: int32, tokens whose KV entries exist once the steps in flight are done. A row that decodes has
            exactly one token more than that: the one its last step in flight, or the last result, yields.
        num_blocks: int32, entries of each of the slot's block tables that are in use, or were.
        next_events: int32, up to how many computed tokens nothing has to be decided for a row: there it is complete, or
            needs a block.
        has_drafts: bool, the row's step in flight tries proposed tokens, so how many it yields is not known.
        token_ids: int32 [slots, max_model_len], the confirmed tokens.
        block_tables: int32 [groups, slots, blocks of max_model_len]; a group is of layers (`BlockGroups`).
        first_blocks: int32 [groups, slots], where the blocks that are held begin: those before fell out of a window.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.keys = np.full(max_num_seqs, VACANT, np.int64)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.next_events = np.zeros(max_num_seqs, np.int32)
        self.end_positions = np.zeros(max_num_seqs, np.int32)
        self.min_positions = np.zeros(max_num_seqs, np.int32)
        self.features = np.zeros(max_num_seqs, np.int32)
        self.has_drafts = np.zeros(max_num_seqs, np.bool_)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.stop_token_ids = np.full((max_num_seqs, 4), NO_TOKEN, np.int32)
        # zeros, not empty: the pages stay untouched (and out of RSS) until a token is written
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self._flat_token_ids = self.token_ids.reshape(-1)  # one index an element is half as dear as two
        self.block_tables = np.zeros((num_groups, max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.first_blocks = np.zeros((num_groups, max_num_seqs), np.int32)
        self.requests: list[Request | None] = [None] * max_num_seqs
        self._vacant = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_vacant(self) -> int:
        """Slots that `place` can still give out."""
        return len(self._vacant)

    def place(self, request: Request) -> int:
        """Give `request` a slot and load its state. No block is held yet."""
        slot = self._vacant.pop()
        request.slot = slot
        self.requests[slot] = request
        count = len(request.token_ids)
        self.keys[slot] = request.key
        self.token_ids[slot, :count] = request.token_ids
        self.num_tokens[slot] = count
        self.num_computed[slot] = self.num_blocks[slot] = 0
        self.first_blocks[:, slot] = 0
        self.end_positions[slot] = request.end_position
        self.min_positions[slot] = request.min_position
        self.has_drafts[slot] = False
        self.features[slot] = request.sampling.features
        self.num_logprobs[slot] = request.sampling.num_logprobs
        self._set_stop_token_ids(slot, request.stop_token_ids)
        return slot

    def vacate(self, request: Request) -> None:
        """Take `request` out of its slot and give it back its token history."""
        slot = request.slot
        request.token_ids = self.token_ids[slot, : self.num_tokens[slot]].copy()
        request.slot = NO_SLOT
        self.requests[slot] = None
        self.keys[slot] = VACANT
        self._vacant.append(slot)

    def append_blocks(self, slots: Slots, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        """Append one block, of `blocks` [groups, n], to each table of `slots` (no repeats). Returns the index each took
        there."""
        indices = self.num_blocks[slots]
        self.block_tables[:, slots, indices] = blocks
        self.num_blocks[slots] = indices + 1
        self._set_next_events(slots)
        return indices

    def extend_blocks(self, slot: int, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        """Append `blocks` [groups, n] to the tables of one slot. Returns the indices they took there, int32 [n]."""
        start = int(self.num_blocks[slot])
        end = start + blocks.shape[1]
        self.block_tables[:, slot, start:end] = blocks
        self.num_blocks[slot] = end
        self._set_next_events(np.array([slot]))
        return np.arange(start, end, dtype=np.int32)

    def append_tokens(self, slots: Slots, positions: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """Confirm one token in each of `slots` (no repeats), at its next position."""
        self._flat_token_ids[slots * self.token_ids.shape[1] + positions] = token_ids
        self.num_tokens[slots] = positions + 1

    def held_blocks(self, slot: int) -> list[NDArray[np.int32]]:
        """The blocks of one slot, those of each group in table order from `first_blocks` on (copies)."""
        end = self.num_blocks[slot]
        firsts = self.first_blocks[:, slot].tolist()
        return [self.block_tables[group, slot, first:end].copy() for group, first in enumerate(firsts)]

    def pass_blocks(self, groups: Slots, slots: Slots, firsts: NDArray[np.int32]) -> NDArray[np.int32]:
        """Let blocks go: what `slots` [n] hold of `groups` [m] begins at `firsts` [m, n] at the earliest from here on.
        Returns the blocks before that, int32; one that several slots share comes as many times.
        """
        rows = groups[:, None], slots[None, :]
        starts = self.first_blocks[rows]
        firsts = np.maximum(firsts, starts)
        counts = firsts - starts
        if not counts.any():
            return _NO_BLOCKS
        self.first_blocks[rows] = firsts
        each = np.repeat(np.arange(counts.size), counts.ravel())  # for each block, which of the m * n it is of
        ends = np.cumsum(counts)
        indices = starts.ravel()[each] + np.arange(each.size) - (ends - counts.ravel())[each]
        passed: NDArray[np.int32] = self.block_tables[groups[each // slots.size], slots[each % slots.size], indices]
        return passed

    def num_results_in_flight(self, slot: int) -> int:
        """Results that a row which decodes is still to get from steps already planned."""
        if self.has_drafts[slot]:
            return 1  # of as many tokens as the worker accepts
        return int(self.num_computed[slot] + 1 - self.num_tokens[slot])

    def num_cacheable(self, slot: int) -> int:
        """Confirmed tokens whose KV entries exist, or will once the steps in flight are done."""
        if self.has_drafts[slot]:  # the last one may stand where another one was proposed and computed
            return int(self.num_tokens[slot]) - 1
        return int(min(self.num_computed[slot], self.num_tokens[slot]))

    @property
    def finish_limits(self) -> FinishLimits:
        """Of all slots, for `check_finish`."""
        return FinishLimits(self.end_positions, self.stop_token_ids, self.min_positions)

    def _set_next_events(self, slots: Slots) -> None:
        # A row that decodes has one token more than it has computed.
        self.next_events[slots] = np.minimum(self.end_positions[slots] - 1, self.num_blocks[slots] * self.block_size)

    def _set_stop_token_ids(self, slot: int, stop_token_ids: tuple[int, ...]) -> None:
        width = self.stop_token_ids.shape[1]
        if len(stop_token_ids) > width:
            grown = np.full((self.max_num_seqs, len(stop_token_ids)), NO_TOKEN, np.int32)
            grown[:, :width] = self.stop_token_ids
            self.stop_token_ids = grown
        self.stop_token_ids[slot] = NO_TOKEN
        self.stop_token_ids[slot, : len(stop_token_ids)] = stop_token_ids
