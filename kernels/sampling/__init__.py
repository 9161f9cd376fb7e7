"""Token sampling and log probabilities; in `reference` and `logprobs` by torch, in `native` without it.

Owns: what callers may use without torch. Never does: arithmetic; that is in the backends' modules beside it.
"""

from __future__ import annotations

from procengine.kernels.sampling.inputs import GREEDY_TEMPERATURE, SamplingColumns, SamplingFeatures

__all__ = ["GREEDY_TEMPERATURE", "SamplingColumns", "SamplingFeatures"]
