"""What a sampler is told about a batch.

Owns: the parameters of each row, as tensors, and which features the batch uses. Never does: validate user input.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

from torch import Tensor

__all__ = ["GREEDY_TEMPERATURE", "SamplingFeatures", "SamplingTensors"]

GREEDY_TEMPERATURE = 1e-5  # anything colder is greedy


class SamplingFeatures(IntFlag):
    """What at least one row of the batch asks for; known on the host, so that nobody pays for what no row uses."""

    NONE = 0
    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """One entry for each of S rows. The value that switches a filter off: top_k 0, top_p 1, min_p 0."""

    temperature: Tensor  # float32 [S]
    top_k: Tensor  # int32 [S]
    top_p: Tensor  # float32 [S]
    min_p: Tensor  # float32 [S]
    seeds: Tensor  # int64 [S]
    positions: Tensor  # int64 [S], of the token to be drawn
