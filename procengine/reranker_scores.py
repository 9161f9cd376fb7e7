"""Hidden states to how surely a language model says yes: the worker's part of `score` for rerankers without labels.

Owns: the comparison of the two tokens' logits behind the prompt (Qwen3-Reranker; Zhang et al. 2025, arXiv:2506.05176).
Never does: write the prompt; the frontend does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from procengine.arrays import A
from procengine.errors import ConfigError
from procengine.label_activations import SCORES
from procengine.prefill_runner import PrefillRunner, Reduction, Sequences, last_states

if TYPE_CHECKING:
    from procengine.device import Device

__all__ = ["open_reranker"]


def open_reranker(device: Device[A]) -> PrefillRunner[A]:
    """The runner of `score` steps: what the first of `score_token_ids` has over the second, if there is one; as a
    probability where the step's option is set."""
    model, token_ids = device.model, device.config.model.score_token_ids
    if not token_ids:
        raise ConfigError(f"score: {device.config.model.name} has neither labels nor tokens that score")
    arrays = model.arrays

    def reduce(states: Sequences[A]) -> Reduction:
        logits = model.compute_logits(last_states(model, states))
        copied = arrays.fetch([logits[:, token_id : token_id + 1] for token_id in token_ids])

        def wait() -> NDArray[np.float32]:
            yes, *no = copied()
            margin = yes - no[0] if no else yes
            score: NDArray[np.float32] = SCORES["sigmoid"](margin) if states.options[0] else margin
            return score.astype(np.float32)

        return Reduction(wait)

    return PrefillRunner("score", model, device.config, reduce)
