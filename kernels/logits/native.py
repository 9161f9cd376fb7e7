"""Changes to logits by the native library and numpy, on the CPU, without torch. In place, like the reference.

Owns: the checks that the C functions rely on. Never does: count tokens, or know what a request is.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.kernels.native import library
from procengine.kernels.native.arguments import address, argument_structure

__all__ = ["add_rows", "apply_penalties", "apply_token_bitmask", "ban_sequences", "ban_tokens_before"]

Array = NDArray[Any]

_PenaltyArguments = argument_structure(
    "PenaltyArgs",
    "logits rows slots output_counts prompt_mask repetition frequency presence",
    "num_rows vocab_size",
    "",
)
_BitmaskArguments = argument_structure("BitmaskArgs", "logits rows words", "num_rows vocab_size num_words", "")


def add_rows(logits: Array, rows: Array, table: Array, slots: Array) -> None:
    """As the reference; `rows` holds each row once."""
    for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
        logits[row] += table[slot]


def apply_penalties(
    logits: Array,
    rows: Array,
    output_counts: Array,
    prompt_mask: Array,
    slots: Array,
    penalties: Array,
) -> None:
    """As the reference, bit for bit."""
    vocab_size = _checked(logits)
    assert output_counts.dtype == np.int32
    assert prompt_mask.dtype == np.bool_
    for table in (output_counts, prompt_mask):
        assert table.shape[1] == vocab_size
        assert table.flags.c_contiguous
    rows, slots = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(slots, np.int64)
    assert rows.shape == slots.shape == (penalties.shape[0],)
    repetition, frequency, presence = (np.ascontiguousarray(penalties[:, i], np.float32) for i in range(3))
    arguments = _PenaltyArguments(
        logits=address(logits),
        rows=address(rows),
        slots=address(slots),
        output_counts=address(output_counts),
        prompt_mask=address(prompt_mask),
        repetition=address(repetition),
        frequency=address(frequency),
        presence=address(presence),
        num_rows=rows.size,
        vocab_size=vocab_size,
    )
    _functions().penalties(ctypes.byref(arguments))


def apply_token_bitmask(logits: Array, rows: Array, words: Array) -> None:
    """As the reference."""
    vocab_size = _checked(logits)
    rows, words = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(words, np.int32)
    assert words.shape[0] == rows.size
    arguments = _BitmaskArguments(
        logits=address(logits),
        rows=address(rows),
        words=address(words),
        num_rows=rows.size,
        vocab_size=vocab_size,
        num_words=words.shape[1],
    )
    _functions().bitmask(ctypes.byref(arguments))


def ban_sequences(logits: Array, rows: Array, recent: Array, prefixes: Array, last: Array) -> None:
    """As the reference."""
    matches = ((recent == prefixes) | (prefixes < 0)).all(axis=1)
    logits[rows[matches], last[matches]] = -np.inf


def ban_tokens_before(logits: Array, rows: Array, stop_ids: Array, is_early: Array) -> None:
    """As the reference."""
    banned, columns = ((stop_ids >= 0) & (stop_ids < logits.shape[1]) & is_early[:, None]).nonzero()
    logits[rows[banned], stop_ids[banned, columns]] = -np.inf


def _checked(logits: Array) -> int:
    assert logits.dtype == np.float32
    assert logits.flags.c_contiguous
    return int(logits.shape[1])


class _Functions:
    def __init__(self) -> None:
        self.penalties = library.native_function("pe_apply_penalties", None, ctypes.POINTER(_PenaltyArguments))
        self.bitmask = library.native_function("pe_apply_token_bitmask", None, ctypes.POINTER(_BitmaskArguments))


@cache
def _functions() -> _Functions:
    return _Functions()
