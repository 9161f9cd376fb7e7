"""What a sampler is told about a batch.

Owns: the parameters of each row, as tensors or numpy arrays, and which features the batch uses. Never does: validate
user input. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Generic, TypeVar

__all__ = ["GREEDY_TEMPERATURE", "SamplingColumns", "SamplingFeatures"]

A = TypeVar("A")  # of arrays: torch's or numpy's

GREEDY_TEMPERATURE = 1e-5  # anything colder is greedy


class SamplingFeatures(IntFlag):
    """What at least one row of the batch asks for; known on the host, so that nobody pays for what no row uses."""

    NONE = 0
    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8


@dataclass(frozen=True, slots=True)
class SamplingColumns(Generic[A]):
    """One entry for each of S rows. The value that switches a filter off: top_k 0, top_p 1, min_p 0."""

    temperature: A  # float32 [S]
    top_k: A  # int32 [S]
    top_p: A  # float32 [S]
    min_p: A  # float32 [S]
    seeds: A  # int64 [S]
    positions: A  # int64 [S], of the token to be drawn
