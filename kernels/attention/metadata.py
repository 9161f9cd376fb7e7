"""Which tokens of a step belong to which sequence, and where their keys and values lie.

Owns: the layout of a step as attention sees it. Never does: build it; the runner does.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AttentionMetadata"]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """R rows with T query tokens in all. Decode rows (one query token) come first, then prefill chunks.

    A row's query tokens are the last ones of its context, so position p of the row lies in block
    `block_tables[row, p // block_size]`. Entries of a block table beyond the row's context, and of blocks that a window
    has passed, must be valid block ids (0 will do); what those hold, NaN included, never reaches a result.
    """

    num_decode_rows: int
    query_start_loc: Tensor  # int32 [R+1]; row r's queries are query_start_loc[r] .. query_start_loc[r+1]
    seq_lens: Tensor  # int32 [R]; context length, this step's tokens included
    block_tables: Tensor  # int32 [R, max_blocks]
    slot_mapping: Tensor  # int64 [T]; where this step's keys and values go
    max_query_len: int
    max_seq_len: int
