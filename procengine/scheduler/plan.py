"""`StepPlan`: what one step computes, as the scheduler decided it and the input builder encodes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from procengine.request import Request

__all__ = ["BlockUpdate", "PrefillChunk", "StepPlan"]

_NO_ROWS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive known tokens of one request. `token_ids` is int32 [length]; `samples`: it yields a token."""

    slot: int
    start: int
    token_ids: NDArray[np.int32]
    samples: bool


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """Block table entries that changed: `block_tables[slots, indices] = blocks`, int32 arrays of one length."""

    slots: NDArray[np.int32]
    indices: NDArray[np.int32]
    blocks: NDArray[np.int32]


@dataclass(slots=True)
class StepPlan:
    """One step. Rows are the decode slots in order, then the chunks in order.

    Attributes:
        decode_positions: int32, where each decode row's input token stands (its sampled token stands one further).
        row_steps: int32, forward passes each decode row takes part in, at most `decode_steps`.
        admitted: requests that got their slot in this step.
    """

    decode_slots: NDArray[np.int32] = field(default_factory=lambda: _NO_ROWS)
    decode_positions: NDArray[np.int32] = field(default_factory=lambda: _NO_ROWS)
    row_steps: NDArray[np.int32] = field(default_factory=lambda: _NO_ROWS)
    decode_steps: int = 1
    chunks: list[PrefillChunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return self.decode_slots.size + len(self.chunks)

    def sample_slots(self) -> NDArray[np.int32]:
        """Slots that yield a token in the first forward pass, in row order."""
        if not self.chunks:
            return self.decode_slots
        sampled = np.array([chunk.slot for chunk in self.chunks if chunk.samples], np.int32)
        return np.concatenate((self.decode_slots, sampled))
