"""Pooling in plain torch.

Owns: the arithmetic that the other backend is tested against. Never does: choose how a model pools.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

__all__ = ["pool_last", "pool_mean"]


def pool_last(hidden: Tensor, bounds: Tensor) -> Tensor:
    """The last state of each sequence, with length 1.

    hidden: floats [T, H], sequences one behind the other; bounds: int [R + 1], where each begins, and T. None is empty.
    Returns float32 [R, H].
    """
    return functional.normalize(hidden[bounds[1:].long() - 1].float(), dim=-1)


def pool_mean(hidden: Tensor, bounds: Tensor) -> Tensor:
    """The mean of each sequence's states, with length 1. Arguments and result as `pool_last`."""
    lengths = bounds.long().diff()
    numbers = torch.arange(lengths.numel(), device=hidden.device)
    rows = torch.repeat_interleave(numbers, lengths, output_size=hidden.shape[0])  # without the size it would wait
    sums = torch.zeros((lengths.numel(), hidden.shape[1]), device=hidden.device).index_add_(0, rows, hidden.float())
    return functional.normalize(sums / lengths.unsqueeze(1), dim=-1)
