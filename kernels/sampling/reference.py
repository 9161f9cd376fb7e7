"""Sampling in plain torch.

Owns: the rule by which logits, parameters and a random number give a token. Never does: keep state, or change logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from procengine.kernels import host_reads
from procengine.kernels.sampling.filters import filter_logits
from procengine.kernels.sampling.inputs import GREEDY_TEMPERATURE, SamplingColumns, SamplingFeatures
from procengine.kernels.sampling.randomness import add_gumbel_noise, row_keys

__all__ = ["sample", "select_rows"]

_CACHED_ELEMENTS = 1 << 18


def sample(logits: Tensor, tensors: SamplingColumns[Tensor], features: SamplingFeatures) -> Tensor:
    """One token a row. logits: float32 [S, V]; returns int32 [S].

    A row colder than GREEDY_TEMPERATURE takes the most likely token, the lowest id among equals. Any other row takes
    the largest of its filtered, scaled logits plus Gumbel noise f(seed, position, token), which is a draw from their
    softmax (the Gumbel-max trick). A row's token depends on nothing but the row; and what rounding does to logits in
    one batch and not in another changes it only if two tokens are as close as that, whereas inverting the cumulative
    distribution would add the rounding of the whole vocabulary up.
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
        tensors, logits = select_rows(tensors, rows), logits[rows]
    greedy[rows] = _draw(logits, tensors, features)
    return greedy.to(torch.int32)


def _draw(logits: Tensor, tensors: SamplingColumns[Tensor], features: SamplingFeatures) -> Tensor:
    """int64 [S], for rows that are all warm enough to divide by their temperature."""
    scaled = filter_logits(logits / tensors.temperature.unsqueeze(1), tensors, features)
    keys = row_keys(tensors.seeds, tensors.positions)
    if not host_reads.are_free(logits):
        return add_gumbel_noise(scaled, keys).argmax(dim=-1)
    rows = max(1, _CACHED_ELEMENTS // logits.shape[1])  # a few rows at a time stay in the cache through all passes
    parts = zip(scaled.split(rows), keys.split(rows), strict=True)
    return torch.cat([add_gumbel_noise(some, of).argmax(dim=-1) for some, of in parts])


def select_rows(tensors: SamplingColumns[Tensor], rows: Tensor) -> SamplingColumns[Tensor]:
    """Some of the entries. rows: int64 [n], or bool [S]."""
    return SamplingColumns(
        temperature=tensors.temperature[rows],
        top_k=tensors.top_k[rows],
        top_p=tensors.top_p[rows],
        min_p=tensors.min_p[rows],
        seeds=tensors.seeds[rows],
        positions=tensors.positions[rows],
    )


def _warm(tensors: SamplingColumns[Tensor], is_random: Tensor) -> SamplingColumns[Tensor]:
    """The same with temperature 1 in greedy rows, whose draw is thrown away."""
    return SamplingColumns(
        temperature=torch.where(is_random, tensors.temperature, 1.0),
        top_k=tensors.top_k,
        top_p=tensors.top_p,
        min_p=tensors.min_p,
        seeds=tensors.seeds,
        positions=tensors.positions,
    )
