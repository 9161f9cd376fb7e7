"""Sampling by the native library, on the CPU: no sort, no second pass over what cannot win.

Owns: the checks that the C function relies on, and what becomes of rows whose token is uncertain (the reference
is asked). Never does: arithmetic; `native/sampling.h` says how that goes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from procengine.kernels.native import library
from procengine.kernels.native.arguments import argument_structure
from procengine.kernels.sampling import reference
from procengine.kernels.sampling.inputs import SamplingFeatures, SamplingTensors

__all__ = ["sample"]

_Arguments = argument_structure(
    "SampleArgs",
    "logits temperature top_k top_p log_min_p seeds positions tokens uncertain",
    "logits_stride num_rows vocab_size",
    "features",
)


def sample(logits: Tensor, tensors: SamplingTensors, features: SamplingFeatures) -> Tensor:
    """The reference's tokens. logits: float32 [S, V], V at least 1; returns int32 [S]."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    tokens = torch.empty(num_rows, dtype=torch.int32)
    uncertain = torch.empty(num_rows, dtype=torch.bool)
    arguments = _Arguments(
        logits=logits.data_ptr(),
        tokens=tokens.data_ptr(),
        uncertain=uncertain.data_ptr(),
        logits_stride=logits.stride(0),
        num_rows=num_rows,
        vocab_size=vocab_size,
        features=int(features),
    )
    if not features & SamplingFeatures.RANDOM:
        _function()(ctypes.byref(arguments))
        return tokens
    columns = _columns(tensors)
    for name, column in columns.items():
        setattr(arguments, name, column.data_ptr())
    _function()(ctypes.byref(arguments))
    if uncertain.any():
        rows = uncertain.nonzero().squeeze(1)
        tokens[rows] = reference.sample(logits[rows], reference.select_rows(tensors, rows), features)
    return tokens


def _columns(tensors: SamplingTensors) -> dict[str, Tensor]:
    columns = {
        "temperature": tensors.temperature,
        "top_k": tensors.top_k,
        "top_p": tensors.top_p,
        "log_min_p": tensors.min_p.clamp(max=1.0).log(),
        "seeds": tensors.seeds,
        "positions": tensors.positions,
    }
    return {name: column.contiguous() for name, column in columns.items()}


@cache
def _function() -> Any:
    return library.native_function("pe_sample", None, ctypes.POINTER(_Arguments))
