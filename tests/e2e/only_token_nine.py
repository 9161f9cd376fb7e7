"""A logits processor for a test: every row draws token 9."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.logits_processors import LogitsContext

__all__ = ["make"]


def make(model: ModelConfig) -> Callable[[Tensor, LogitsContext], Tensor]:
    """Answers with logits of its own, not with those it was given."""

    def process(logits: Tensor, context: LogitsContext) -> Tensor:
        assert logits.shape == (context.keys.size, model.vocab_size)
        only = torch.full_like(logits, -torch.inf)
        only[:, 9] = 0.0
        return only

    return process
