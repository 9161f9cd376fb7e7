"""min_p, top_k and top_p: which tokens of a row may be drawn.

Owns: the filters and their order. Never does: draw, or change its arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from procengine.kernels import host_reads
from procengine.kernels.sampling.inputs import SamplingColumns, SamplingFeatures

__all__ = ["filter_logits"]

_Filter = Callable[[Tensor, Tensor], Tensor]

# A nucleus is nearly always narrower than this, and finding the largest few is ten times cheaper than sorting all.
_NUCLEUS_GUESS = 1024


def filter_logits(scaled: Tensor, tensors: SamplingColumns[Tensor], features: SamplingFeatures) -> Tensor:
    """`scaled` (logits over temperature, float32 [S, V]) with -inf where a token is not to be drawn.

    In vLLM's order: min_p, top_k, top_p, each on what the one before left. At least one token stays.
    """
    if features & SamplingFeatures.MIN_P:
        scaled = _where_used(scaled, tensors.min_p, tensors.min_p > 0, _min_p)
    if features & SamplingFeatures.TOP_K:
        used = (tensors.top_k > 0) & (tensors.top_k < scaled.shape[1])
        scaled = _where_used(scaled, tensors.top_k, used, _top_k)
    if features & SamplingFeatures.TOP_P:
        scaled = _where_used(scaled, tensors.top_p, tensors.top_p < 1, _top_p)
    return scaled


def _where_used(scaled: Tensor, parameter: Tensor, used: Tensor, apply: _Filter) -> Tensor:
    """Apply a filter to the rows that use it; on a device, where picking them would mean waiting, to all."""
    if not host_reads.are_free(scaled):
        return torch.where(used.unsqueeze(1), apply(scaled, parameter), scaled)
    rows = used.nonzero().squeeze(1)
    if rows.numel() == 0:
        return scaled
    if rows.numel() == scaled.shape[0]:
        return apply(scaled, parameter)
    return scaled.index_copy(0, rows, apply(scaled[rows], parameter[rows]))


def _min_p(scaled: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082)."""
    floor = scaled.amax(dim=-1, keepdim=True) + min_p.clamp(max=1.0).log().unsqueeze(1)
    return scaled.masked_fill(scaled < floor, -torch.inf)


def _top_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    """Keep the k likeliest tokens, exactly k of them."""
    vocab_size = scaled.shape[1]
    counts = top_k.to(torch.int64).clamp(1, vocab_size).unsqueeze(1)
    width = int(counts.max()) if host_reads.are_free(scaled) else vocab_size
    largest = scaled.topk(width, dim=-1).values
    return _keep_largest(scaled, counts, largest.gather(1, counts - 1))


def _top_p(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of likeliest tokens whose mass reaches top_p (Holtzman et al. 2020, arXiv:1904.09751)."""
    vocab_size = scaled.shape[1]
    log_total = scaled.logsumexp(dim=-1, keepdim=True)
    if vocab_size <= _NUCLEUS_GUESS or not host_reads.are_free(scaled):
        return _keep_nucleus(scaled, scaled.topk(vocab_size, dim=-1).values, log_total, top_p)
    largest = scaled.topk(_NUCLEUS_GUESS, dim=-1).values
    wide = _mass_before(largest, log_total)[:, -1] < top_p
    if not bool(wide.any()):
        return _keep_nucleus(scaled, largest, log_total, top_p)
    out = torch.empty_like(scaled)
    sorted_wide = scaled[wide].sort(dim=-1, descending=True).values
    out[wide] = _keep_nucleus(scaled[wide], sorted_wide, log_total[wide], top_p[wide])
    out[~wide] = _keep_nucleus(scaled[~wide], largest[~wide], log_total[~wide], top_p[~wide])
    return out


def _mass_before(largest: Tensor, log_total: Tensor) -> Tensor:
    """float64, like `largest` (which descends): the probability of all that stands before each."""
    probabilities = (largest - log_total).exp().to(torch.float64)
    return probabilities.cumsum(dim=-1) - probabilities


def _keep_nucleus(scaled: Tensor, largest: Tensor, log_total: Tensor, top_p: Tensor) -> Tensor:
    """top_p, given at least as many of the largest values, in order, as any nucleus holds."""
    counts = (_mass_before(largest, log_total) < top_p.unsqueeze(1)).sum(dim=-1, keepdim=True).clamp_(min=1)
    return _keep_largest(scaled, counts, largest.gather(1, counts - 1))


def _keep_largest(scaled: Tensor, counts: Tensor, smallest_kept: Tensor) -> Tensor:
    """Keep exactly `counts` tokens, given the value of the last; the lowest ids among equals of it. Both [S, 1]."""
    keep = scaled >= smallest_kept
    if not host_reads.are_free(scaled) or not torch.equal(keep.sum(dim=-1, keepdim=True), counts):
        above = scaled > smallest_kept
        vacancies = counts - above.sum(dim=-1, keepdim=True)
        keep = above | (keep & ((keep ^ above).cumsum(dim=-1) <= vacancies))
    return scaled.masked_fill(~keep, -torch.inf)
