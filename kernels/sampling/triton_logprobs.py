"""Log probabilities of chosen tokens in Triton.

Owns: the kernel and its launch. Never does: apply temperature or filters; these are the model's own probabilities.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from procengine.kernels.sampling.logprobs import top_tokens

__all__ = ["gather_logprobs"]

_BLOCK = 4096
_NUM_WARPS = 8  # a row has one program


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference, without a copy of the logits: a row is read for its sum and once more to rank the token."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    chosen = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    log_sums = torch.empty_like(chosen)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        _logprobs_kernel[(num_rows,)](
            logits,
            token_ids,
            chosen,
            log_sums,
            ranks,
            logits.stride(0),
            vocab_size,
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
            num_warps=_NUM_WARPS,
        )
    lowest = torch.finfo(torch.float32).min
    top_ids, top_logits = top_tokens(logits, min(num_top, vocab_size))
    top = (top_logits - log_sums.unsqueeze(1)).clamp_(min=lowest)
    ids = torch.cat((token_ids.unsqueeze(1).to(torch.int64), top_ids), dim=1).to(torch.int32)
    return ids, torch.cat((chosen.clamp_(min=lowest).unsqueeze(1), top), dim=1), ranks


@triton.jit(do_not_specialize_on_alignment=["token_ids"])  # which lie anywhere in a step's payload
def _logprobs_kernel(
    logits: tl.tensor,
    token_ids: tl.tensor,
    chosen: tl.tensor,
    log_sums: tl.tensor,
    ranks: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    own = tl.load(row_logits + tl.load(token_ids + row))
    highest, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    rank = tl.full([], 1, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(row_logits + ids, mask=ids < vocab_size, other=float("-inf"))
        rank += tl.sum((values > own).to(tl.int32), axis=0)
        tile = tl.maximum(highest, tl.max(values, axis=0))
        reference = tl.where(tile == float("-inf"), 0.0, tile)
        total = total * tl.exp(highest - reference) + tl.sum(tl.exp(values - reference), axis=0)
        highest = tile
    log_sum = highest + tl.log(total)
    tl.store(chosen + row, own - log_sum)
    tl.store(log_sums + row, log_sum)
    tl.store(ranks + row, rank)
