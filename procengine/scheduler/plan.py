"""`StepPlan`: what one step computes, as the scheduler decided it and the input builder encodes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from procengine.request import Request

__all__ = ["BlockUpdate", "PrefillChunk", "StepPlan"]

_NO_ROWS = np.zeros(0, np.int32)
_NO_SLOTS = np.zeros(0, np.intp)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive known tokens of one request.

    Attributes:
        token_ids: int32 [length].
        num_samples: how many of the last tokens are sampled behind: 0 in the middle of a prompt, 1 at its end, all of
            them when they are the newest token and proposals for those that follow.
        prompt_targets: int32, the tokens that follow the first ones, if their logprobs are wanted.
        num_prompt_logprobs: alternatives to show for each of them.
    """

    slot: int
    start: int
    token_ids: NDArray[np.int32]
    num_samples: int
    prompt_targets: NDArray[np.int32] = field(default_factory=lambda: _NO_ROWS)
    num_prompt_logprobs: int = -1

    @property
    def samples(self) -> bool:
        """Whether it yields a token."""
        return self.num_samples > 0


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """Block table entries that changed: `block_tables[:, slots, indices] = blocks`."""

    slots: NDArray[np.intp]  # [n]
    indices: NDArray[np.int32]  # [n]
    blocks: NDArray[np.int32]  # [groups, n]


@dataclass(slots=True)
class StepPlan:
    """One step. Rows are the decode slots in order, then the chunks in order.

    Attributes:
        decode_slots: intp; the same array as in the step before while no row comes or goes.
        decode_positions: int32, where each decode row's input token stands (its sampled token stands one further).
        decode_token_ids: int32, the decode rows' input tokens; None: the worker has them.
        row_steps: int32, forward passes each decode row takes part in, at most `decode_steps`.
        admitted: requests that got their slot in this step.
        masked: (sample, int32 [words]) for samples that obey a grammar: bit i of word w allows token 32 * w + i.
    """

    decode_slots: NDArray[np.intp] = field(default_factory=lambda: _NO_SLOTS)
    decode_positions: NDArray[np.int32] = field(default_factory=lambda: _NO_ROWS)
    row_steps: NDArray[np.int32] = field(default_factory=lambda: _NO_ROWS)
    decode_token_ids: NDArray[np.int32] | None = None
    decode_steps: int = 1
    chunks: list[PrefillChunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    masked: list[tuple[int, NDArray[np.int32]]] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return self.decode_slots.size + len(self.chunks)

    def sample_slots(self) -> NDArray[np.intp]:
        """Slots that yield a token in the first forward pass, in row order."""
        if not self.chunks:
            return self.decode_slots
        slots = np.array([chunk.slot for chunk in self.chunks], np.intp)
        return np.concatenate((self.decode_slots, np.repeat(slots, [chunk.num_samples for chunk in self.chunks])))
