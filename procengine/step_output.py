"""`StepOutput`: what one forward pass yields, on its way from the device to a message.

Owns: the layout of a result payload. Never does: know torch: whoever holds device tensors gives a `wait` that copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from procengine.messages import EmbedResult, StepResult
from procengine.step_payload import RESULT_SECTIONS, pack_sections

__all__ = ["EmbedOutput", "Logprobs", "StepOutput", "WorkerIdentity"]

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Which worker, and which life of it, a result comes from."""

    rank: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of k rows: `rows` int32 [k]; the others int32 / float32 [k, width]."""

    rows: Int32s
    token_ids: Int32s
    logprobs: NDArray[np.float32]
    ranks: Int32s


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens of one forward pass. `wait()` blocks until they are on the host; it is called off the device loop."""

    step_id: int
    micro_step: int
    is_last: bool
    keys: NDArray[np.int64]
    positions: Int32s
    wait: Callable[[], tuple[Int32s, Logprobs | None]]
    busy_ns: int

    def to_message(self, identity: WorkerIdentity) -> tuple[StepResult, Int32s]:
        """Header and payload of the result."""
        token_ids, logprobs = self.wait()
        sections = {"key_words": self.keys.view(np.int32), "positions": self.positions, "token_ids": token_ids}
        if logprobs is not None:
            sections["logprob_rows"] = logprobs.rows
            sections["logprob_token_ids"] = logprobs.token_ids.ravel()
            sections["logprobs"] = logprobs.logprobs.ravel().view(np.int32)
            sections["logprob_ranks"] = logprobs.ranks.ravel()
        buffer = np.empty(sum(section.size for section in sections.values()), np.int32)
        payload, sizes = pack_sections(RESULT_SECTIONS, sections, buffer)
        header = StepResult(
            identity.rank,
            identity.epoch,
            self.step_id,
            self.micro_step,
            self.is_last,
            token_ids.size,
            self.busy_ns,
            sizes,
        )
        return header, payload


@dataclass(frozen=True, slots=True)
class EmbedOutput:
    """Vectors of one embed step. `wait()` gives float32 [rows, dim] on the host."""

    step_id: int
    keys: NDArray[np.int64]
    wait: Callable[[], NDArray[np.float32]]
    busy_ns: int

    def to_message(self, identity: WorkerIdentity) -> tuple[EmbedResult, Int32s]:
        """Header and payload of the result."""
        vectors = self.wait()
        payload = np.concatenate((self.keys.view(np.int32), vectors.ravel().view(np.int32)))
        sizes = (2 * self.keys.size, vectors.size)
        header = EmbedResult(identity.rank, identity.epoch, self.step_id, self.keys.size, self.busy_ns, sizes)
        return header, payload
