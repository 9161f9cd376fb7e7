"""Hidden states to the log probabilities of the tokens of texts: the worker's part of `score_text`.

Owns: which token is told by which state, and how many logits exist at once. Never does: add up; whoever asked does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from procengine.arrays import A
from procengine.executor import Model
from procengine.prefill_runner import PrefillRunner, Reduction, Sequences

if TYPE_CHECKING:
    from procengine.device import Device

__all__ = ["open_score_text"]

_LOGITS_CHUNK: Final = 64  # tokens whose logits exist at once


def open_score_text(device: Device[A]) -> PrefillRunner[A]:
    """The runner of `score_text` steps."""
    model = device.model
    return PrefillRunner(
        "score_text", model, device.config, lambda states: _log_probabilities(model, states), overlaps=True
    )


def _log_probabilities(model: Model[A], states: Sequences[A]) -> Reduction:
    """Of each token but a sequence's first, given those before it: natural logarithms."""
    arrays = model.arrays
    counts = np.diff(states.bounds) - np.int32(1)
    tellers = np.delete(np.arange(len(states.input_ids)), states.bounds[1:] - 1)
    targets = states.input_ids[tellers + 1]
    if not tellers.size:
        return Reduction(lambda: np.empty(0, np.float32), counts)
    parts = []
    for at in range(0, tellers.size, _LOGITS_CHUNK):
        some = slice(at, at + _LOGITS_CHUNK)
        # Logits have no name here: those of one chunk are gone before the next's are made.
        chosen = arrays.kernels.gather_logprobs(
            model.compute_logits(states.hidden[arrays.send(tellers[some])]), arrays.send(targets[some]), 0
        )
        parts.append(chosen[1])
    copied = arrays.fetch([arrays.concatenate(parts, 0)])

    def wait() -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = copied()[0].ravel()
        return numbers

    return Reduction(wait, counts)
