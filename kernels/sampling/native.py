"""Sampling and log probabilities by the native library, on the CPU, without torch: no sort, no second pass over what
cannot win.

Owns: the checks that the C functions rely on. Never does: arithmetic; `native/sampling.h` and `native/logits.h` say how
that goes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.kernels.native import library
from procengine.kernels.native.arguments import address, argument_structure
from procengine.kernels.sampling.inputs import SamplingColumns, SamplingFeatures

__all__ = ["draw", "gather_logprobs", "sample"]

Array = NDArray[Any]

_SampleArguments = argument_structure(
    "SampleArgs",
    "logits temperature top_k top_p log_min_p seeds positions tokens uncertain",
    "logits_stride num_rows vocab_size",
    "features",
)
_LogprobArguments = argument_structure(
    "LogprobArgs", "logits token_ids ids logprobs ranks", "logits_stride num_rows vocab_size num_top", ""
)
_DTYPES = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "log_min_p": np.float32,
    "seeds": np.int64,
    "positions": np.int64,
}


def sample(logits: Array, columns: SamplingColumns[Array], features: SamplingFeatures) -> NDArray[np.int32]:
    """The reference's tokens. logits: float32 [S, V], V at least 1, rows contiguous; returns int32 [S].

    Where float32 cannot tell which of two tokens wins (one row in some thirty thousand), float64 does, the same on
    every machine; the reference, whose logarithms each machine rounds in its own way, may take the other.
    """
    return draw(logits, columns, features)[0]


def draw(
    logits: Array, columns: SamplingColumns[Array], features: SamplingFeatures
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """The tokens, and in which rows (bool [S]) the reference may take another."""
    num_rows, vocab_size = _checked(logits)
    tokens, uncertain = np.empty(num_rows, np.int32), np.zeros(num_rows, np.bool_)
    arguments = _SampleArguments(
        logits=address(logits),
        tokens=address(tokens),
        uncertain=address(uncertain),
        logits_stride=logits.strides[0] // 4,
        num_rows=num_rows,
        vocab_size=vocab_size,
        features=int(features),
    )
    kept = _columns(columns) if features & SamplingFeatures.RANDOM else {}
    for name, column in kept.items():
        setattr(arguments, name, address(column))
    _functions().sample(ctypes.byref(arguments))
    return tokens, uncertain


def gather_logprobs(
    logits: Array, token_ids: Array, num_top: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    """The chosen token first, then the num_top likeliest (which may include it), likeliest first, then lowest id.

    As the reference in `logprobs.py`, whose sums it is one rounding of a float32 from.
    """
    num_rows, vocab_size = _checked(logits)
    num_top = min(num_top, vocab_size)
    chosen = np.ascontiguousarray(token_ids, np.int32)
    assert chosen.shape == (num_rows,)
    ids, logprobs = np.empty((num_rows, num_top + 1), np.int32), np.empty((num_rows, num_top + 1), np.float32)
    ranks = np.empty(num_rows, np.int32)
    arguments = _LogprobArguments(
        logits=address(logits),
        token_ids=address(chosen),
        ids=address(ids),
        logprobs=address(logprobs),
        ranks=address(ranks),
        logits_stride=logits.strides[0] // 4,
        num_rows=num_rows,
        vocab_size=vocab_size,
        num_top=num_top,
    )
    _functions().logprobs(ctypes.byref(arguments))
    return ids, logprobs, ranks


def _checked(logits: Array) -> tuple[int, int]:
    num_rows, vocab_size = logits.shape
    assert logits.dtype == np.float32
    assert vocab_size > 0
    assert num_rows == 0 or logits.strides[1] == 4
    return num_rows, vocab_size


def _columns(columns: SamplingColumns[Array]) -> dict[str, Array]:
    with np.errstate(divide="ignore"):
        log_min_p = np.log(np.minimum(columns.min_p, np.float32(1)))
    values = {
        "temperature": columns.temperature,
        "top_k": columns.top_k,
        "top_p": columns.top_p,
        "log_min_p": log_min_p,
        "seeds": columns.seeds,
        "positions": columns.positions,
    }
    return {name: np.ascontiguousarray(value, _DTYPES[name]) for name, value in values.items()}


class _Functions:
    def __init__(self) -> None:
        self.sample = library.native_function("pe_sample", None, ctypes.POINTER(_SampleArguments))
        self.logprobs = library.native_function("pe_gather_logprobs", None, ctypes.POINTER(_LogprobArguments))


@cache
def _functions() -> _Functions:
    return _Functions()
