"""Logits of whole sequences through an executor, and how far two sets of them are apart.

Owns: the layout of one step of prompts. Never does: sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.executor import ForwardBatch, Model
from procengine.kv_tensors import KVTensors

__all__ = ["logits_of", "relative_error"]

_BLOCK_SIZE = 16


def logits_of(config: ModelConfig, model: Model[Any], sequences: Sequence[list[int]], kv_dtype: Any) -> Tensor:
    """float32 [tokens of all sequences, V], computed in one step."""
    arrays = model.arrays
    lengths = [len(one) for one in sequences]
    width = -(-max(lengths) // _BLOCK_SIZE)
    tables = np.arange(len(sequences) * width, dtype=np.int32).reshape(-1, width)
    executor = model.open(KVTensors(config, tables.size, _BLOCK_SIZE, kv_dtype, arrays))
    hidden = executor.forward(
        ForwardBatch(
            input_ids=arrays.send(np.fromiter(chain.from_iterable(sequences), np.int32)),
            positions=arrays.send(np.concatenate([np.arange(length) for length in lengths])),
            query_start_loc=arrays.send(np.array([0, *accumulate(lengths)], np.int32)),
            seq_lens=arrays.send(np.array(lengths, np.int32)),
            slots=arrays.send(np.arange(len(sequences))),
            block_tables=arrays.send(tables[None]),
            num_decode_rows=0,
            max_query_len=max(lengths),
            max_seq_len=max(lengths),
            wanted=None,
        )
    )
    logits: Tensor = executor.compute_logits(hidden)
    return logits


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, relative to the spread of what is expected."""
    difference = (logits - expected).square().mean().sqrt()
    return float(difference / torch.std(expected))
