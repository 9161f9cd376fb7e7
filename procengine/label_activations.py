"""From logits of labels to scores: `SCORES`.

Owns: softmax and sigmoid in numpy. Never does: choose one; the model's files do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

__all__ = ["SCORES", "sigmoid"]


def sigmoid(x: Any) -> Any:
    """Of each number, in its dtype."""
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x < 0, small, 1) / (1 + small)


def _softmax(x: Any) -> Any:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


# Each of logits, float32 [n, labels].
SCORES: Final[dict[str, Callable[[Any], Any]]] = {"softmax": _softmax, "sigmoid": sigmoid, "identity": lambda x: x}
