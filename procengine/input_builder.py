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
from procengine.scheduler.slot_table import SlotTable
from procengine.step_payload import BLOCK_UPDATE_WIDTH, SLOT_ROW, STEP_SECTIONS, pack_sections

__all__ = ["InputBuilder"]

Int32s = NDArray[np.int32]

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class _Unchanged:
    """What follows from the rows alone. The scheduler gives the same array while no row comes or goes."""

    slots: Int32s
    references: Int32s  # -1 - slot
    features: int
    num_logprobs: int


class InputBuilder:
    """Encodes the steps of one worker. The payload is valid until the next `build`."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._count = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._buffer = np.empty(8 * max_num_seqs + 2 * max_num_batched_tokens + 1024, np.int32)
        self._unchanged = _Unchanged(self._count[:0], self._count[:0], 0, -1)

    def build(self, plan: StepPlan, table: SlotTable, *, step_id: int, epoch: int) -> tuple[StepInput, Int32s]:
        """Header and payload (int32 [n]) of `plan`, whose rows `table` describes."""
        sections = self._rows(plan) if plan.chunks else self._decode_rows(plan)
        if plan.admitted:
            sections["slot_rows"] = np.array([_slot_row(r) for r in plan.admitted], np.int32).ravel()
        if plan.block_updates:
            sections["block_updates"] = _block_updates(plan)
        if plan.decode_steps > 1:
            sections["row_steps"] = plan.row_steps
        payload, sizes = self._pack(sections)
        slots, query_start_loc = sections["slots"], sections["query_start_loc"]
        features, num_logprobs = self._unchanged.features, self._unchanged.num_logprobs
        if slots is not self._unchanged.slots:
            features = int(np.bitwise_or.reduce(table.features[slots]))
            num_logprobs = int(table.num_logprobs[slots].max())
            self._unchanged = _Unchanged(slots, -1 - slots, features, num_logprobs)
        header = StepInput(
            step_id=step_id,
            epoch=epoch,
            num_rows=plan.num_rows,
            num_decode_rows=plan.decode_slots.size,
            num_tokens=int(query_start_loc[-1]),
            num_samples=sections["sample_rows"].size,
            decode_steps=plan.decode_steps,
            max_query_len=max((chunk.token_ids.size for chunk in plan.chunks), default=1),
            max_seq_len=int(sections["seq_lens"].max()),
            features=features,
            num_logprobs=num_logprobs,
            sizes=sizes,
        )
        return header, payload

    def _decode_rows(self, plan: StepPlan) -> dict[str, Int32s]:
        count = plan.decode_slots.size
        is_unchanged = plan.decode_slots is self._unchanged.slots
        references = self._unchanged.references if is_unchanged else -1 - plan.decode_slots
        return {
            "slots": plan.decode_slots,
            "query_start_loc": self._count[: count + 1],
            "seq_lens": plan.decode_positions + 1,
            "sample_rows": self._count[:count],
            "input_ids": references,
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
        return {name: np.concatenate((head, tails[name])) for name, head in sections.items()}

    def _pack(self, sections: dict[str, Int32s]) -> tuple[Int32s, tuple[int, ...]]:
        needed = sum(section.size for section in sections.values())
        if needed > self._buffer.size:
            self._buffer = np.empty(2 * needed, np.int32)
        return pack_sections(STEP_SECTIONS, sections, self._buffer)


def _slot_row(request: Request) -> list[int]:
    sampling = request.sampling
    temperature = min(sampling.temperature, _MAX_FLOAT32)  # beyond it every token is as likely as the other
    reals = np.array([temperature, sampling.top_p, sampling.min_p], np.float32).view(np.int32).tolist()
    words = np.array([request.key, sampling.seed], np.int64).view(np.int32).tolist()
    top_k = min(sampling.top_k, np.iinfo(np.int32).max)
    row = [request.slot, *words, reals[0], top_k, reals[1], reals[2], sampling.num_logprobs]
    assert len(row) == len(SLOT_ROW)
    return row


def _block_updates(plan: StepPlan) -> Int32s:
    """int32 [updates * 3], triples (slot, index, block)."""
    columns = [
        np.concatenate([getattr(u, name) for u in plan.block_updates]) for name in ("slots", "indices", "blocks")
    ]
    triples = np.stack(columns, axis=1)
    assert triples.shape[1] == BLOCK_UPDATE_WIDTH
    return triples.ravel()
