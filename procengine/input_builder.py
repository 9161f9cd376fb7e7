"""`InputBuilder`: turns a `StepPlan` into the header and the int32 payload a worker needs.

Owns: the encoding buffer. Never does: decide what runs, or keep a plan. A step of decode rows alone is a few vector
operations, whatever the batch size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from procengine.messages import StepInput
from procengine.request import Request
from procengine.scheduler.plan import StepPlan
from procengine.scheduler.slot_table import Slots, SlotTable
from procengine.slot_lists import float32_bits, slot_lists
from procengine.step_payload import SLOT_ROW, STEP_SECTIONS, cut_sections, pack_sections

__all__ = ["InputBuilder"]

Int32s = NDArray[np.int32]
_BLOCK_UPDATES = STEP_SECTIONS.index("block_updates")


@dataclass(frozen=True, slots=True)
class _DecodeLayout:
    """The payload of decode rows that go on by one token, laid out once for as long as no row comes or goes.

    Attributes:
        slots: intp [rows]; the scheduler gives the same array while the rows are the same.
        payload: int32, all of it; `seq_lens` and `positions` are views of the two sections that change each step.
        sizes: of its sections.
        features, num_logprobs: what the rows ask for.
    """

    slots: Slots
    payload: Int32s
    seq_lens: Int32s
    positions: Int32s
    sizes: tuple[int, ...]
    features: int
    num_logprobs: int


class InputBuilder:
    """Encodes the steps of one worker. The payload is valid until the next `build`."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._count = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._buffer = np.empty(8 * max_num_seqs + 2 * max_num_batched_tokens + 1024, np.int32)
        self._layout: _DecodeLayout | None = None

    def build(self, plan: StepPlan, table: SlotTable, *, step_id: int, epoch: int) -> tuple[StepInput, Int32s]:
        """Header and payload (int32 [n]) of `plan`, whose rows `table` describes."""
        if _is_steady(plan):
            return self._build_steady(plan, table, step_id, epoch)
        sections = self._rows(plan) if plan.chunks else self._decode_rows(plan)
        if plan.admitted:
            sections["slot_rows"] = np.array([_slot_row(r) for r in plan.admitted], np.int32).ravel()
            sections["slot_lists"] = slot_lists(plan.admitted)
        if plan.block_updates:
            sections["block_updates"] = _block_updates(plan)
        if plan.decode_steps > 1:
            sections["row_steps"] = plan.row_steps
        if plan.masked:
            sections |= _masks(plan)
        payload, sizes = self._pack(sections)
        slots = sections["slots"]
        header = StepInput(
            step_id=step_id,
            epoch=epoch,
            num_rows=plan.num_rows,
            num_decode_rows=plan.decode_slots.size,
            num_tokens=int(sections["query_start_loc"][-1]),
            num_samples=sections["sample_rows"].size,
            decode_steps=plan.decode_steps,
            max_query_len=max((chunk.token_ids.size for chunk in plan.chunks), default=1),
            max_seq_len=int(sections["seq_lens"].max()),
            features=int(np.bitwise_or.reduce(table.features[slots])),
            num_logprobs=int(table.num_logprobs[slots].max()),
            sizes=sizes,
        )
        return header, payload

    def _build_steady(self, plan: StepPlan, table: SlotTable, step_id: int, epoch: int) -> tuple[StepInput, Int32s]:
        """A step in which every row decodes one token: two sections are written, the others are there already."""
        layout = self._layout
        if layout is None or plan.decode_slots is not layout.slots:
            layout = self._layout = self._lay_out(plan, table)
        np.add(plan.decode_positions, 1, out=layout.seq_lens)
        layout.positions[:] = plan.decode_positions
        payload, sizes = layout.payload, layout.sizes
        if plan.block_updates:
            updates = _block_updates(plan)
            payload = np.concatenate((payload, updates))
            sizes = tuple(updates.size if i == _BLOCK_UPDATES else size for i, size in enumerate(sizes))
        count = plan.decode_slots.size
        header = StepInput(
            step_id,
            epoch,
            count,
            count,
            count,
            count,
            1,
            1,
            int(layout.seq_lens.max()),
            layout.features,
            layout.num_logprobs,
            sizes,
        )
        return header, payload

    def _lay_out(self, plan: StepPlan, table: SlotTable) -> _DecodeLayout:
        slots, sections = plan.decode_slots, self._decode_rows(plan)
        payload, sizes = pack_sections(
            STEP_SECTIONS, sections, np.empty(sum(section.size for section in sections.values()), np.int32)
        )
        views = cut_sections(STEP_SECTIONS, sizes, payload)
        return _DecodeLayout(
            slots,
            payload,
            views["seq_lens"],
            views["positions"],
            sizes,
            int(np.bitwise_or.reduce(table.features[slots])),
            int(table.num_logprobs[slots].max()),
        )

    def _decode_rows(self, plan: StepPlan) -> dict[str, Int32s]:
        count, slots = plan.decode_slots.size, plan.decode_slots.astype(np.int32)
        return {
            "slots": slots,
            "query_start_loc": self._count[: count + 1],
            "seq_lens": plan.decode_positions + 1,
            "sample_rows": self._count[:count],
            "input_ids": -1 - slots if plan.decode_token_ids is None else plan.decode_token_ids,
            "positions": plan.decode_positions,
        }

    def _rows(self, plan: StepPlan) -> dict[str, Int32s]:
        sections, chunks = self._decode_rows(plan), plan.chunks
        num_decodes = plan.decode_slots.size
        lengths = np.array([chunk.token_ids.size for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        sampling = np.flatnonzero([chunk.samples for chunk in chunks]).astype(np.int32) + num_decodes
        tails = {
            "slots": np.array([chunk.slot for chunk in chunks], np.int32),
            "query_start_loc": num_decodes + np.cumsum(lengths, dtype=np.int32),
            "seq_lens": starts + lengths,
            "sample_rows": sampling,
            "input_ids": np.concatenate([chunk.token_ids for chunk in chunks]),
            "positions": np.concatenate(
                [np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, lengths, strict=True)]
            ),
        }
        joined = {name: np.concatenate((head, tails[name])) for name, head in sections.items()}
        if any(chunk.num_samples > 1 for chunk in chunks):
            counts = [chunk.num_samples for chunk in chunks if chunk.samples]
            joined["sample_counts"] = np.array([1] * num_decodes + counts, np.int32)
        if any(chunk.prompt_targets.size for chunk in chunks):
            joined |= _prompt_targets(plan)
        return joined

    def _pack(self, sections: dict[str, Int32s]) -> tuple[Int32s, tuple[int, ...]]:
        needed = sum(section.size for section in sections.values())
        if needed > self._buffer.size:
            self._buffer = np.empty(2 * needed, np.int32)
        return pack_sections(STEP_SECTIONS, sections, self._buffer)


def _is_steady(plan: StepPlan) -> bool:
    """Whether each row decodes one token, and nothing else has to be said but which blocks are new."""
    return plan.decode_steps == 1 and not plan.chunks and not plan.masked and plan.decode_token_ids is None


def _slot_row(request: Request) -> list[int]:
    sampling = request.sampling
    words = np.array([request.key, sampling.seed], np.int64).view(np.int32).tolist()
    top_k = min(sampling.top_k, np.iinfo(np.int32).max)
    row = [
        request.slot,
        *words,
        float32_bits(sampling.temperature),
        top_k,
        float32_bits(sampling.top_p),
        float32_bits(sampling.min_p),
        sampling.num_logprobs,
        sampling.features,
        float32_bits(sampling.repetition_penalty),
        float32_bits(sampling.frequency_penalty),
        float32_bits(sampling.presence_penalty),
    ]
    assert len(row) == len(SLOT_ROW)
    return row


def _masks(plan: StepPlan) -> dict[str, Int32s]:
    """Which samples obey a grammar, and the tokens that theirs allows."""
    return {
        "masked_rows": np.array([sample for sample, _ in plan.masked], np.int32),
        "mask_words": np.concatenate([mask for _, mask in plan.masked]),
    }


def _prompt_targets(plan: StepPlan) -> dict[str, Int32s]:
    """Rows whose prompt logprobs are wanted, and the tokens whose logprobs those are."""
    rows = [
        (at, chunk.prompt_targets.size, chunk.num_prompt_logprobs)
        for at, chunk in enumerate(plan.chunks, plan.decode_slots.size)
        if chunk.prompt_targets.size
    ]
    targets = [chunk.prompt_targets for chunk in plan.chunks if chunk.prompt_targets.size]
    return {"prompt_rows": np.array(rows, np.int32).ravel(), "prompt_targets": np.concatenate(targets)}


def _block_updates(plan: StepPlan) -> Int32s:
    """int32 [updates * (2 + groups)], rows (slot, index, the block of each group)."""
    updates = plan.block_updates
    slots = np.concatenate([update.slots for update in updates])
    indices = np.concatenate([update.indices for update in updates])
    blocks = np.concatenate([update.blocks for update in updates], axis=1)
    return np.concatenate((slots[None], indices[None], blocks)).T.astype(np.int32, copy=False).ravel()
