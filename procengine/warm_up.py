"""Everything that is compiled or loaded when it is first used, used once before the first step: seconds that no request
is to wait for.

Owns: which batches that takes. Never does: compute (it is given the forward pass), or touch a block of a request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from procengine.executor import ForwardBatch
from procengine.kernels.operations import Operations
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures
from procengine.models.decoder import Decoder

__all__ = ["warm_up"]

# Tokens of a prompt beside a decode row. Products with rounded weights have a kernel for each power of two of rows, and
# another way for many.
_LENGTHS = (2,)
_LENGTHS_ROUNDED = (2, 31, 63, 127, 200)


def warm_up(
    model: Decoder, forward: Callable[[ForwardBatch[Tensor]], Tensor], block_tables: Tensor, block_size: int
) -> None:
    """Runs steps of a decode row and a prompt, in one split of a context and in as many as there may be, and all that
    becomes of logits. `block_tables`: as `DecodeGraphs` has them; only their last row, which is nobody's, is used."""
    capacity = block_tables.shape[-1] * block_size
    for length in _LENGTHS if model.quantization == "none" else _LENGTHS_ROUNDED:
        prompt = min(length, capacity)
        hidden = forward(_batch(block_tables, prompt, prompt))
        if model.operations.names["attention"] == "triton":  # others have no splits, or gather all that there might be
            forward(_batch(block_tables, prompt, capacity))
        _use_logits(model.operations, model.compute_logits(hidden))


def _batch(block_tables: Tensor, prompt: int, max_seq_len: int) -> ForwardBatch[Tensor]:
    device, nobody = block_tables.device, block_tables.shape[-2] - 1

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardBatch(
        input_ids=ints([0] * (1 + prompt)),
        positions=ints([0, *range(prompt)], torch.int64),
        query_start_loc=ints([0, 1, 1 + prompt]),
        seq_lens=ints([1, prompt]),
        slots=ints([nobody, nobody], torch.int64),
        block_tables=block_tables,
        num_decode_rows=1,
        max_query_len=prompt,
        max_seq_len=max_seq_len,
        wanted=None,
    )


def _use_logits(operations: Operations, logits: Tensor) -> None:
    (num_rows, vocab_size), device = logits.shape, logits.device
    rows = torch.arange(num_rows, device=device)
    table = torch.ones((num_rows, 3), device=device)
    top_k = torch.ones(num_rows, dtype=torch.int32, device=device)
    columns = SamplingColumns(table[:, 0], top_k, table[:, 1], table[:, 2], rows, rows)
    operations.sample(logits, columns, SamplingFeatures.RANDOM)
    tokens = operations.sample(logits, columns, SamplingFeatures.NONE)
    operations.gather_logprobs(logits, tokens, 1)
    counts = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
    first = rows[:1]
    operations.apply_penalties(logits, first, counts, counts > 0, first, table[:1])
    words = torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32, device=device)
    operations.apply_token_bitmask(logits, first, words)
