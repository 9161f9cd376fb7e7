"""`StepOutput`: what one forward pass yields, on its way from the device to a message.

Owns: the layout of a result payload. Never does: know torch: whoever holds device tensors gives a `wait` that copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from procengine.messages import EmbedResult, StepResult
from procengine.step_payload import RESULT_SECTIONS, pack_sections

__all__ = [
    "EmbedOutput",
    "Logprobs",
    "PassTimes",
    "PromptLogprobs",
    "SampledTokens",
    "StepOutput",
    "WorkerIdentity",
    "accepted_samples",
]

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Which worker, and which life of it, a result comes from."""

    rank: int
    epoch: int


class PassTimes(NamedTuple):
    """When a forward pass went through the device loop, CLOCK_MONOTONIC ns: taken up, inputs on the device, hidden
    states computed, sampled. On a device that runs behind its host these are the times of issue."""

    started_ns: int
    staged_ns: int
    forwarded_ns: int
    done_ns: int

    @property
    def busy_ns(self) -> int:
        """How long the device loop was busy with it."""
        return self.done_ns - self.started_ns


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of k rows: `rows` int32 [k]; the others int32 / float32 [k, width]."""

    rows: Int32s
    token_ids: Int32s
    logprobs: NDArray[np.float32]
    ranks: Int32s


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the tokens of some prompts: `spans` int32 [prompts, 4] (key low, key high, first position, count); the others
    int32 / float32 [tokens, width]."""

    spans: Int32s
    token_ids: Int32s
    logprobs: NDArray[np.float32]
    ranks: Int32s


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens on the host. `is_accepted`, bool [samples], says which count; None: all."""

    token_ids: Int32s
    is_accepted: NDArray[np.bool_] | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens of one forward pass. `wait()` blocks until they are on the host; it is called off the device loop."""

    step_id: int
    micro_step: int
    is_last: bool
    keys: NDArray[np.int64]
    positions: Int32s
    wait: Callable[[], SampledTokens]
    times: PassTimes

    def to_message(self, identity: WorkerIdentity, tokens: SampledTokens) -> tuple[StepResult, Int32s]:
        """Header and payload of the result, with what `wait()` gave."""
        keys, positions, token_ids = self.keys, self.positions, tokens.token_ids
        if tokens.is_accepted is not None:
            keys, positions, token_ids = (
                keys[tokens.is_accepted],
                positions[tokens.is_accepted],
                token_ids[tokens.is_accepted],
            )
        sections = {"key_words": keys.view(np.int32), "positions": positions, "token_ids": token_ids}
        if tokens.logprobs is not None:
            sections |= _logprob_sections(tokens.logprobs)
            if tokens.is_accepted is not None:  # rows are counted among what is sent
                sections["logprob_rows"] = (np.cumsum(tokens.is_accepted) - 1)[tokens.logprobs.rows].astype(np.int32)
        if tokens.prompt_logprobs is not None:
            sections |= _prompt_sections(tokens.prompt_logprobs)
        buffer = np.empty(sum(section.size for section in sections.values()), np.int32)
        payload, sizes = pack_sections(RESULT_SECTIONS, sections, buffer)
        header = StepResult(
            identity.rank,
            identity.epoch,
            self.step_id,
            self.micro_step,
            self.is_last,
            token_ids.size,
            self.times.busy_ns,
            sizes,
        )
        return header, payload


@dataclass(frozen=True, slots=True)
class EmbedOutput:
    """Numbers of one step without generation. `wait()` gives float32 [rows, dim] on the host or, with `counts` (int32
    [rows]), so many for each row, one behind the other."""

    step_id: int
    keys: NDArray[np.int64]
    wait: Callable[[], NDArray[np.float32]]
    times: PassTimes
    micro_step: int = 0
    workflow: str = "embed"
    counts: Int32s | None = None

    def to_message(self, identity: WorkerIdentity, numbers: NDArray[np.float32]) -> tuple[EmbedResult, Int32s]:
        """Header and payload of the result, with what `wait()` gave."""
        counts = np.empty(0, np.int32) if self.counts is None else self.counts
        payload = np.concatenate((self.keys.view(np.int32), numbers.ravel().view(np.int32), counts))
        sizes = (2 * self.keys.size, numbers.size, counts.size)
        rank, epoch, busy_ns = identity.rank, identity.epoch, self.times.busy_ns
        return EmbedResult(rank, epoch, self.step_id, self.keys.size, busy_ns, sizes, self.workflow), payload


def accepted_samples(sampled: Int32s, proposed: Int32s, counts: Int32s) -> NDArray[np.bool_]:
    """Which samples of rows with proposals count: those up to and including the first that differs from the proposal.

    Args:
        sampled: int32 [samples], rows one behind the other.
        proposed: int32 [samples], what was proposed for the position of each sample; any value at a row's last one.
        counts: int32 [rows], samples of each row.

    Returns:
        bool [samples].
    """
    ends = np.cumsum(counts)
    agrees = sampled == proposed
    agrees[ends - 1] = False  # nothing was proposed there
    num_agreeing = np.cumsum(agrees) - agrees  # before each sample
    starts = np.repeat(ends - counts, counts)
    is_accepted: NDArray[np.bool_] = num_agreeing - num_agreeing[starts] == np.arange(sampled.size) - starts
    return is_accepted


def _logprob_sections(logprobs: Logprobs) -> dict[str, Int32s]:
    return {
        "logprob_rows": logprobs.rows,
        "logprob_token_ids": logprobs.token_ids.ravel(),
        "logprobs": logprobs.logprobs.ravel().view(np.int32),
        "logprob_ranks": logprobs.ranks.ravel(),
    }


def _prompt_sections(logprobs: PromptLogprobs) -> dict[str, Int32s]:
    return {
        "prompt_spans": logprobs.spans.ravel(),
        "prompt_logprob_token_ids": logprobs.token_ids.ravel(),
        "prompt_logprobs": logprobs.logprobs.ravel().view(np.int32),
        "prompt_logprob_ranks": logprobs.ranks.ravel(),
    }
