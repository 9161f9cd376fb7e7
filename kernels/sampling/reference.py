"""Sampling in plain torch.

Owns: the rule by which logits, parameters and a random number give a token. Never does: keep state, or change logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from procengine.kernels import host_reads
from procengine.kernels.sampling.filters import filter_logits
from procengine.kernels.sampling.inputs import GREEDY_TEMPERATURE, SamplingFeatures, SamplingTensors
from procengine.kernels.sampling.randomness import uniforms

__all__ = ["sample"]


def sample(logits: Tensor, tensors: SamplingTensors, features: SamplingFeatures) -> Tensor:
    """One token a row. logits: float32 [S, V]; returns int32 [S].

    A row colder than GREEDY_TEMPERATURE takes the most likely token, the lowest id among equals. Any other row takes
    the token where the distribution function of its filtered softmax, in vocabulary order, passes u = f(seed,
    position). A row's token depends on nothing but the row.
    """
    greedy = logits.argmax(dim=-1)
    if not features & SamplingFeatures.RANDOM:
        return greedy.to(torch.int32)
    is_random = tensors.temperature >= GREEDY_TEMPERATURE
    if not host_reads.are_free(logits):  # finding the random rows would wait for the device: draw for all rows instead
        drawn = _draw(logits, _warm(tensors, is_random), features)
        return torch.where(is_random, drawn, greedy).to(torch.int32)
    rows = is_random.nonzero().squeeze(1)
    if rows.numel() == 0:
        return greedy.to(torch.int32)
    if rows.numel() < logits.shape[0]:
        tensors, logits = _select(tensors, rows), logits[rows]
    greedy[rows] = _draw(logits, tensors, features)
    return greedy.to(torch.int32)


def _draw(logits: Tensor, tensors: SamplingTensors, features: SamplingFeatures) -> Tensor:
    """int64 [S], for rows that are all warm enough to divide by their temperature."""
    scaled = logits / tensors.temperature.unsqueeze(1)
    scaled = filter_logits(scaled, tensors, features)
    return _invert_cdf(scaled.softmax(dim=-1), uniforms(tensors.seeds, tensors.positions))


def _invert_cdf(probabilities: Tensor, u: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds u * total; never one of probability zero.

    probabilities: float32 [S, V], u: float64 [S]; returns int64 [S]. The sum is float64, so that the tail of a large
    vocabulary keeps its share.
    """
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    token = torch.searchsorted(cumulative, u.unsqueeze(1) * total, right=True)
    last = torch.searchsorted(cumulative, total)  # u * total may round up to total
    return torch.minimum(token, last).squeeze(1).clamp_(max=probabilities.shape[1] - 1)


def _select(tensors: SamplingTensors, rows: Tensor) -> SamplingTensors:
    return SamplingTensors(
        temperature=tensors.temperature[rows],
        top_k=tensors.top_k[rows],
        top_p=tensors.top_p[rows],
        min_p=tensors.min_p[rows],
        seeds=tensors.seeds[rows],
        positions=tensors.positions[rows],
    )


def _warm(tensors: SamplingTensors, is_random: Tensor) -> SamplingTensors:
    """The same with temperature 1 in greedy rows, whose draw is thrown away."""
    return SamplingTensors(
        temperature=torch.where(is_random, tensors.temperature, 1.0),
        top_k=tensors.top_k,
        top_p=tensors.top_p,
        min_p=tensors.min_p,
        seeds=tensors.seeds,
        positions=tensors.positions,
    )
