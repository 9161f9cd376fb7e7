"""Log probabilities of chosen and of likeliest tokens.

Owns: the numbers and their order. Never does: apply temperature or filters; these are the model's own probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gather_logprobs", "top_tokens"]

# Enough spare candidates that equals at the edge of the top are told apart by id, which `topk` alone does not do.
_SPARE_CANDIDATES = 16


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen token first, then the num_top likeliest (which may include it), likeliest first, then lowest id.

    logits: float32 [S, V], token_ids: int [S]. Returns ids int32 [S, num_top+1], logprobs float32 [S, num_top+1] and
    ranks int32 [S]: how many tokens are likelier than the chosen one, plus one. num_top is cut to V.
    """
    chosen = token_ids.to(torch.int64).unsqueeze(1)
    # Clamped, so that what goes into JSON is a number even where a logit is -inf or the difference overflows.
    logprobs = logits.log_softmax(dim=-1).clamp_(min=torch.finfo(torch.float32).min)
    chosen_logprobs = logprobs.gather(1, chosen)
    ranks = (logprobs > chosen_logprobs).sum(dim=-1) + 1
    top_ids, top_logprobs = top_tokens(logprobs, min(num_top, logits.shape[1]))
    ids = torch.cat((chosen, top_ids), dim=1).to(torch.int32)
    return ids, torch.cat((chosen_logprobs, top_logprobs), dim=1), ranks.to(torch.int32)


def top_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row of float32 [S, V], then the lowest ids: int64 and float32, both [S, count]."""
    if count == 0:
        return scores.new_empty((scores.shape[0], 0), dtype=torch.int64), scores[:, :0]
    width = min(count + _SPARE_CANDIDATES, scores.shape[1])
    candidates = scores.topk(width, dim=-1).indices.sort(dim=-1).values
    values, order = scores.gather(1, candidates).sort(dim=-1, descending=True, stable=True)
    return candidates.gather(1, order)[:, :count], values[:, :count]
