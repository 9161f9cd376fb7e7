"""Token sampling and log probabilities.

Owns: what callers may use. Never does: arithmetic; that is in the backends' modules beside it.
"""

from __future__ import annotations

from procengine.kernels.sampling.inputs import GREEDY_TEMPERATURE, SamplingFeatures, SamplingTensors
from procengine.kernels.sampling.logprobs import gather_logprobs
from procengine.kernels.sampling.reference import sample

__all__ = ["GREEDY_TEMPERATURE", "SamplingFeatures", "SamplingTensors", "gather_logprobs", "sample"]
