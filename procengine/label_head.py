"""`LabelHead`: from a decoder's hidden states to the scores of its labels; the worker's part of `classify`,
`token_classify`, `score` and `reward` for decoders.

Owns: the one matrix behind the model. Never does: run the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from procengine.arrays import A
from procengine.errors import ConfigError
from procengine.label_activations import SCORES
from procengine.prefill_runner import PrefillRunner, Reduction, Sequences, last_states
from procengine.reranker_scores import open_reranker

if TYPE_CHECKING:
    from procengine.device import Device

__all__ = ["open_classify", "open_reward", "open_score", "open_token_classify"]

Float32s = NDArray[np.float32]


def open_classify(device: Device[A]) -> PrefillRunner[A]:
    """The runner of `classify` steps."""
    return _open("classify", device)


def open_token_classify(device: Device[A]) -> PrefillRunner[A]:
    """The runner of `token_classify` steps."""
    return _open("token_classify", device)


def open_reward(device: Device[A]) -> PrefillRunner[A]:
    """The runner of `reward` steps."""
    return _open("reward", device)


def open_score(device: Device[A]) -> PrefillRunner[A]:
    """The runner of `score` steps: of a model with one label, or of one that says yes or no."""
    return _open("score", device) if device.config.model.head is not None else open_reranker(device)


def _open(workflow: str, device: Device[A]) -> PrefillRunner[A]:
    config, weights, model = device.config.model.head, device.label_weights, device.model
    if config is None or weights is None:
        raise ConfigError(f"{workflow}: {device.config.model.name} has no labels")
    arrays, activate = model.arrays, SCORES[config.activation]

    def reduce(states: Sequences[A]) -> Reduction:
        of_tokens = config.level == "token"
        chosen = states.hidden if of_tokens else last_states(model, states)
        copied = arrays.fetch([arrays.to_float32(chosen)])

        def wait() -> Float32s:
            logits = weights.logits(copied()[0])
            scores: Float32s = (activate(logits) if states.options[0] else logits).astype(np.float32)
            return scores

        return Reduction(wait, np.diff(states.bounds) * np.int32(len(config.labels)) if of_tokens else None)

    return PrefillRunner(workflow, model, device.config, reduce)
