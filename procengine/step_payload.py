"""Payload frames: one contiguous int32 array cut into named sections, in a fixed order.

Owns: the order and meaning of the sections. Never does: know torch, sockets or requests.
Wider values ride in int32 pairs: int64 keys and seeds as (low, high) words, float32 as its bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EMBED_SECTIONS",
    "RESULT_SECTIONS",
    "SLOT_ROW",
    "STEP_SECTIONS",
    "SlotList",
    "block_update_width",
    "cut_sections",
    "iter_rounds",
    "iter_slot_lists",
    "join_int64",
    "pack_sections",
    "split_int64",
]

STEP_SECTIONS: Final = (
    "slots",  # [rows] the slot of each row
    "query_start_loc",  # [rows + 1] where each row's tokens start
    "seq_lens",  # [rows] tokens in the row's context, this step's included
    "sample_rows",  # [samples] rows that yield a token
    "row_steps",  # [rows] forward passes the row takes part in; empty when decode_steps is 1
    "input_ids",  # [tokens] token ids; -1 - slot stands for the slot's last sampled token
    "positions",  # [tokens]
    "slot_rows",  # [changed * len(SLOT_ROW)] what a slot holds from this step on
    "block_updates",  # [updates * block_update_width(groups)] (slot, index in its block tables, block id of each group)
    "slot_lists",  # records (SlotList, slot, length, data...) of slots in slot_rows
    "masked_rows",  # [m] samples that obey a grammar
    "mask_words",  # [m * words] bit i of word w allows token 32 * w + i
    "prompt_rows",  # [p * 3] (row, number of targets, alternatives) of rows whose prompt logprobs are wanted
    "prompt_targets",  # [targets] the tokens that follow the first tokens of those rows
    "sample_counts",  # [samples] last tokens of the row that are sampled; empty when it is 1 for all
)
SLOT_ROW: Final = (
    "slot",
    "key_low",
    "key_high",
    "seed_low",
    "seed_high",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "num_logprobs",  # -1 is none
    "features",  # bits of row_features
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


class SlotList(IntEnum):
    """Kinds of records in `slot_lists`, and their data."""

    HISTORY = 0  # prompt length, then all tokens known so far: for penalties and bad words
    BIAS = 1  # what all logits get (float32 bits), then (token, what it gets instead) pairs
    EARLY_STOPS = 2  # a position, then the tokens that may not be sampled before it
    BAD_WORD = 3  # the tokens of one sequence
    ADAPTER = 4  # the place of a LoRA adapter; a slot without one has none of these


RESULT_SECTIONS: Final = (
    "key_words",  # [rows * 2] int64 request keys
    "positions",  # [rows] where each token stands in its sequence
    "token_ids",  # [rows]
    "logprob_rows",  # [k] rows that asked for log probabilities
    "logprob_token_ids",  # [k * width] chosen token first, then the most likely ones
    "logprobs",  # [k * width] float32 bits
    "logprob_ranks",  # [k * width]
    "prompt_spans",  # [p * 4] (key low, key high, position of the first target, targets)
    "prompt_logprob_token_ids",  # [targets * prompt width]
    "prompt_logprobs",  # [targets * prompt width] float32 bits
    "prompt_logprob_ranks",  # [targets * prompt width]
)

EMBED_SECTIONS: Final = (
    "key_words",  # [rows * 2]
    "query_start_loc",  # [rows + 1]
    "input_ids",  # [tokens]
    "positions",  # [tokens]
    "token_types",  # [tokens], or empty: all 0
)


def block_update_width(num_groups: int) -> int:
    """Elements of one entry of `block_updates`, in a group whose models have so many groups of layers."""
    return 2 + num_groups


def pack_sections(
    names: Sequence[str], sections: Mapping[str, NDArray[np.int32]], buffer: NDArray[np.int32]
) -> tuple[NDArray[np.int32], tuple[int, ...]]:
    """Lay sections one behind the other into `buffer`; absent ones are empty.

    Returns:
        The used part of `buffer` and the size of each section, in elements.
    """
    sizes: list[int] = []
    end = 0
    for name in names:
        section = sections.get(name)
        size = 0 if section is None else section.size
        if section is not None and size:
            buffer[end : end + size] = section
        sizes.append(size)
        end += size
    return buffer[:end], tuple(sizes)


def cut_sections(
    names: Sequence[str], sizes: Sequence[int], payload: NDArray[np.int32]
) -> dict[str, NDArray[np.int32]]:
    """Views of a payload's sections by name. The views are as writable and as aligned as `payload`."""
    sections: dict[str, NDArray[np.int32]] = {}
    end = 0
    for name, size in zip(names, sizes, strict=True):
        sections[name] = payload[end : end + size]
        end += size
    return sections


def split_int64(values: NDArray[np.int64]) -> NDArray[np.int32]:
    """int64 [n] as int32 words [2n], low word first (a view: the machine is little-endian)."""
    return values.view(np.int32)


def join_int64(words: NDArray[np.int32]) -> NDArray[np.int64]:
    """int32 words [2n] as int64 [n]; copies, because a payload may be unaligned."""
    return words.copy().view(np.int64)


def iter_slot_lists(section: NDArray[np.int32]) -> Iterator[tuple[SlotList, int, NDArray[np.int32]]]:
    """The records of a `slot_lists` section: (kind, slot, data)."""
    at = 0
    while at < section.size:
        kind, slot, length = section[at : at + 3].tolist()
        yield SlotList(kind), slot, section[at + 3 : at + 3 + length]
        at += 3 + length


def iter_rounds(keys: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Cut rows in which a key may stand several times (one behind the other) into rounds in which none does.

    Yields (indices of the round's rows, whether each is the last of its key), earliest rows first.
    """
    starts = np.ones(keys.size, np.bool_)
    starts[1:] = keys[1:] != keys[:-1]
    first = np.maximum.accumulate(np.where(starts, np.arange(keys.size), 0))
    ordinals = np.arange(keys.size) - first
    is_last = np.append(starts[1:], True)
    for ordinal in range(int(ordinals.max(initial=-1)) + 1):
        rows = np.flatnonzero(ordinals == ordinal)
        yield rows, is_last[rows]
