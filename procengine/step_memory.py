"""`StepMemoryError`: a step for which the memory of its device did not suffice.

Owns: what is told of it. Never does: name torch: the worker catches it, and may not load that.
"""

from __future__ import annotations

from collections.abc import Sequence

from procengine.errors import ProcengineError

__all__ = ["StepMemoryError"]


class StepMemoryError(ProcengineError):
    """`keys`: the requests of the step."""

    def __init__(self, text: str, keys: Sequence[int]) -> None:
        super().__init__(text)
        self.keys = tuple(keys)
