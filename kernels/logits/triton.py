"""Changes to logits in Triton, in place.

Owns: the kernels and their launch. Never does: count tokens, know what a request is, or wait for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["apply_penalties", "apply_token_bitmask"]

_BLOCK = 1024


def apply_penalties(
    logits: Tensor, rows: Tensor, output_counts: Tensor, prompt_mask: Tensor, slots: Tensor, penalties: Tensor
) -> None:
    """As the reference: one pass over counts, mask and logits, which writes where something changed."""
    vocab_size = logits.shape[1]
    for table in (logits, output_counts, prompt_mask):
        assert table.stride(1) == 1
    if rows.shape[0]:
        _penalties_kernel[(rows.shape[0], triton.cdiv(vocab_size, _BLOCK))](
            logits,
            rows,
            output_counts,
            prompt_mask.view(torch.uint8),
            slots,
            penalties.contiguous(),
            logits.stride(0),
            output_counts.stride(0),
            prompt_mask.stride(0),
            vocab_size,
            BLOCK=_BLOCK,
        )


def apply_token_bitmask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """As the reference."""
    vocab_size, num_words = logits.shape[1], words.shape[1]
    assert logits.stride(1) == words.stride(1) == 1
    if rows.shape[0]:
        _bitmask_kernel[(rows.shape[0], triton.cdiv(vocab_size, _BLOCK))](
            logits, rows, words, logits.stride(0), words.stride(0), vocab_size, num_words, BLOCK=_BLOCK
        )


@triton.jit
def _penalties_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    output_counts: tl.tensor,
    prompt_mask: tl.tensor,
    slots: tl.tensor,
    penalties: tl.tensor,
    logits_stride: tl.tensor,
    counts_stride: tl.tensor,
    mask_stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    entry = tl.program_id(0).to(tl.int64)
    row, slot = tl.load(rows + entry), tl.load(slots + entry)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = ids < vocab_size
    counts = tl.load(output_counts + slot * counts_stride + ids, mask=is_inside, other=0)
    in_prompt = tl.load(prompt_mask + slot * mask_stride + ids, mask=is_inside, other=0)
    is_seen = is_inside & ((counts > 0) | (in_prompt > 0))
    values = tl.load(logits + row * logits_stride + ids, mask=is_seen, other=0.0)
    repetition = tl.load(penalties + entry * 3)
    values = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values = values - counts.to(tl.float32) * tl.load(penalties + entry * 3 + 1)
    values = values - (counts > 0).to(tl.float32) * tl.load(penalties + entry * 3 + 2)
    tl.store(logits + row * logits_stride + ids, values, mask=is_seen)


# Words lie anywhere in a step's payload, and whoever makes them says how many there are.
@triton.jit(do_not_specialize=["words_stride", "num_words"], do_not_specialize_on_alignment=["words"])
def _bitmask_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    words: tl.tensor,
    logits_stride: tl.tensor,
    words_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + entry * words_stride + ids // 32, mask=ids // 32 < num_words, other=0)
    is_forbidden = ((word >> (ids % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + ids, float("-inf"), mask=(ids < vocab_size) & is_forbidden)
