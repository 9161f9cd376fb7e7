"""`LabelWeights`: what a decoder with labels has behind its last norm, read from its checkpoint; free of torch.

Owns: the tensor's name and its check. Never does: decide what the logits mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from procengine.config import ModelConfig
from procengine.models.float_tensors import read_float32
from procengine.models.weights import WeightSource

__all__ = ["LabelWeights", "read_label_weights"]

Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LabelWeights:
    """A linear layer in float32: [labels, hidden] and [labels]."""

    weight: Float32s
    bias: Float32s | None

    def logits(self, hidden: Float32s) -> Float32s:
        """float32 [n, labels] of hidden states [n, hidden]."""
        product: Float32s = hidden @ self.weight.T
        return product if self.bias is None else product + self.bias


def read_label_weights(config: ModelConfig, source: WeightSource) -> LabelWeights:
    """`score` of the checkpoint. Raises ModelError naming a tensor that is missing or of the wrong shape."""
    assert config.head is not None
    count = len(config.head.labels)
    weight = _read(config, source, "score.weight", (count, config.hidden_size))
    return LabelWeights(weight, _read(config, source, "score.bias", (count,)) if config.head.has_bias else None)


def _read(config: ModelConfig, source: WeightSource, name: str, shape: tuple[int, ...]) -> Float32s:
    # A reader of files may have put a prefix before all names.
    stored = next((one for one in (name, f"model.{name}") if one in source.names), name)
    return read_float32(config.path, source, stored, shape)
