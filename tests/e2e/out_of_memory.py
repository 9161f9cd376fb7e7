"""A logits processor for a test: a device whose memory does not suffice for a step with a long row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.logits_processors import LogitsContext

__all__ = ["LONGEST", "make"]

LONGEST = 100  # tokens


def make(_: ModelConfig) -> Callable[[Tensor, LogitsContext], Tensor]:
    """Changes no logits."""

    def process(logits: Tensor, context: LogitsContext) -> Tensor:
        if (context.positions > LONGEST).any():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return logits

    return process
