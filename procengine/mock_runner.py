"""A worker without a model: its tokens are arithmetic, so that a lost, doubled or reordered one is visible.

Owns: `mock_token`. Never does: import torch. It also checks what a real worker must rely on: that decode rows go on
where the slot stopped, and that the block table covers every position.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from procengine.messages import EmbedInput, StepInput
from procengine.step_output import (
    EmbedOutput,
    Logprobs,
    PassTimes,
    PromptLogprobs,
    SampledTokens,
    StepOutput,
    accepted_samples,
)
from procengine.step_payload import (
    EMBED_SECTIONS,
    SLOT_ROW,
    STEP_SECTIONS,
    block_update_width,
    cut_sections,
    join_int64,
)

__all__ = ["MOCK_EMBED_DIM", "MockRunner", "mock_token"]

MOCK_EMBED_DIM = 8
_FIRST_TOKEN = 64  # special tokens, the end of text among them, have small ids
_UNKNOWN = -1


def mock_token(
    key: NDArray[np.int64] | int, position: NDArray[np.int64] | int, vocab_size: int
) -> NDArray[np.int64] | int:
    """The token that stands at `position` of request `key`."""
    return _FIRST_TOKEN + (key * 7919 + position * 104_729) % (vocab_size - _FIRST_TOKEN)


class MockRunner:
    """Runs `generate` and `embed` steps in `step_s` seconds each."""

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        step_s: float,
        num_groups: int = 1,
    ) -> None:
        """`num_groups`: of layers, each with its own block tables."""
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._step_s = step_s
        self._keys = np.empty(max_num_seqs, np.int64)
        self._num_logprobs = np.empty(max_num_seqs, np.int32)
        self._next_positions = np.empty(max_num_seqs, np.int32)
        self._block_tables = np.empty((num_groups, max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.forget_slots()

    def forget_slots(self) -> None:
        """No slot has a request."""
        for table in (self._keys, self._num_logprobs, self._next_positions, self._block_tables):
            table.fill(_UNKNOWN)

    def run(self, header: StepInput | EmbedInput, payload: NDArray[np.int32]) -> Iterator[StepOutput | EmbedOutput]:
        """The outputs of a step, one for each forward pass."""
        if isinstance(header, EmbedInput):
            yield self._embed(header, payload)
            return
        sections = cut_sections(STEP_SECTIONS, header.sizes, payload)
        self._update_slots(sections)
        self._check_rows(header, sections)
        counts = sections["sample_counts"]
        rows = sections["sample_rows"] if not counts.size else np.repeat(sections["sample_rows"], counts)
        slots, positions = sections["slots"][rows], sections["seq_lens"][rows]
        if counts.size:
            behind = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum()) - 1
            positions = positions - behind.astype(np.int32)
        for micro_step in range(header.decode_steps):
            started_ns = time.monotonic_ns()
            self._pause()
            forwarded_ns = time.monotonic_ns()
            if micro_step:
                stays = sections["row_steps"] > micro_step
                slots, positions = sections["slots"][stays], sections["seq_lens"][stays] + np.int32(micro_step)
            tokens = self._tokens(slots, positions, sections)
            self._next_positions[slots] = positions  # of rows with proposals: corrected below
            if tokens.is_accepted is not None:
                self._next_positions[slots[tokens.is_accepted]] = positions[tokens.is_accepted]
            yield StepOutput(
                header.step_id,
                micro_step,
                micro_step == header.decode_steps - 1,
                self._keys[slots],
                positions,
                lambda tokens=tokens: tokens,  # type: ignore[misc]
                PassTimes(started_ns, started_ns, forwarded_ns, time.monotonic_ns()),
            )

    def _tokens(
        self, slots: NDArray[np.int32], positions: NDArray[np.int32], sections: dict[str, NDArray[np.int32]]
    ) -> SampledTokens:
        token_ids = np.asarray(mock_token(self._keys[slots], positions.astype(np.int64), self._vocab_size), np.int32)
        counts, is_accepted = sections["sample_counts"], None
        if counts.size:
            ends = np.repeat(sections["query_start_loc"][sections["sample_rows"] + 1], counts)
            behind = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum()) - 1
            following = np.minimum(ends - behind, sections["input_ids"].size - 1)
            is_accepted = accepted_samples(token_ids, sections["input_ids"][following], counts)
        return SampledTokens(token_ids, is_accepted, self._logprobs(slots, token_ids), self._prompt_logprobs(sections))

    def _logprobs(self, slots: NDArray[np.int32], token_ids: NDArray[np.int32]) -> Logprobs | None:
        rows = np.flatnonzero(self._num_logprobs[slots] >= 0).astype(np.int32)
        if not rows.size:
            return None
        width = int(self._num_logprobs[slots].max()) + 1
        return Logprobs(rows, *_certain(token_ids[rows], width))

    def _prompt_logprobs(self, sections: dict[str, NDArray[np.int32]]) -> PromptLogprobs | None:
        if not sections["prompt_rows"].size:
            return None
        wanted = sections["prompt_rows"].reshape(-1, 3)
        rows = wanted[:, 0]
        lengths = np.diff(sections["query_start_loc"])[rows]
        keys = self._keys[sections["slots"][rows]].view(np.int32).reshape(-1, 2)
        firsts = sections["seq_lens"][rows] - lengths + 1
        spans = np.column_stack((keys, firsts, wanted[:, 1])).astype(np.int32)
        return PromptLogprobs(spans, *_certain(sections["prompt_targets"], int(wanted[:, 2].max()) + 1))

    def _embed(self, header: EmbedInput, payload: NDArray[np.int32]) -> EmbedOutput:
        started_ns = time.monotonic_ns()
        self._pause()
        forwarded_ns = time.monotonic_ns()
        sections = cut_sections(EMBED_SECTIONS, header.sizes, payload)
        bounds = sections["query_start_loc"]
        sums = np.add.reduceat(sections["input_ids"], bounds[:-1]).astype(np.float32)
        asked = header.options[0] if header.workflow == "embed" and header.options else 0
        vectors = np.repeat(sums[:, None], asked or MOCK_EMBED_DIM, axis=1)
        keys = join_int64(sections["key_words"])
        if header.num_sequence_tokens > sections["positions"][-1] + 1:  # a piece of a sequence that goes on
            keys, vectors = keys[:0], vectors[:0]
        return EmbedOutput(
            header.step_id,
            keys,
            lambda: vectors,
            PassTimes(started_ns, started_ns, forwarded_ns, time.monotonic_ns()),
            workflow=header.workflow,
        )

    def _pause(self) -> None:
        if self._step_s:
            time.sleep(self._step_s)

    def _update_slots(self, sections: dict[str, NDArray[np.int32]]) -> None:
        if sections["slot_rows"].size:
            rows = sections["slot_rows"].reshape(-1, len(SLOT_ROW))
            slots = rows[:, SLOT_ROW.index("slot")]
            low = SLOT_ROW.index("key_low")
            self._keys[slots] = join_int64(rows[:, low : low + 2].ravel())
            self._num_logprobs[slots] = rows[:, SLOT_ROW.index("num_logprobs")]
            self._next_positions[slots] = _UNKNOWN
        if sections["block_updates"].size:
            width = block_update_width(len(self._block_tables))
            slots, indices, *blocks = sections["block_updates"].reshape(-1, width).T
            self._block_tables[:, slots, indices] = blocks

    def _check_rows(self, header: StepInput, sections: dict[str, NDArray[np.int32]]) -> None:
        slots, seq_lens = sections["slots"], sections["seq_lens"]
        decodes = slots[: header.num_decode_rows]
        assert (self._next_positions[decodes] == seq_lens[: decodes.size] - 1).all(), "a decode row lost its place"
        assert (self._block_tables[:, slots, (seq_lens - 1) // self._block_size] >= 0).all(), "a position has no block"
        assert np.bincount(slots).max() == 1, "a slot has two rows"


def _certain(
    token_ids: NDArray[np.int32], width: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    """Log probabilities of a model that is sure of these tokens."""
    shown = np.repeat(token_ids[:, None], width, axis=1)
    return shown, np.zeros(shown.shape, np.float32), np.ones(shown.shape, np.int32)
