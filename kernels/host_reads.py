"""Whether the host may look at a tensor's values while a step runs.

Owns: that one question. Never does: copy or wait.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["are_free"]


def are_free(tensor: Tensor) -> bool:
    """Whether reading values costs nothing. On a GPU it would wait for all work queued before, so references take
    there a way of fixed shapes instead, which computes more than the host's way and gives the same."""
    return tensor.device.type == "cpu"
