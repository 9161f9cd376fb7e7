"""The modes a group can run in, as far as they must not change what it answers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

__all__ = ["ALL_MODES", "BLOCK_SIZE", "FAST_MODES", "NUM_BLOCKS", "Mode"]

BLOCK_SIZE = 16
NUM_BLOCKS = 48  # 768 tokens: the longest test prompt with its answer, and not much beside it
_CHUNK_TOKENS = 64
_MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Mode:
    """One combination of the knobs that need a group of their own."""

    async_depth: int
    decode_steps: int
    chunked: bool
    workers: int

    def __str__(self) -> str:
        chunks = "chunked" if self.chunked else "whole"
        return f"depth{self.async_depth}-steps{self.decode_steps}-{chunks}-workers{self.workers}"

    @property
    def options(self) -> dict[str, Any]:
        """Engine options of the mode, with a pool so small that a crowd of requests must preempt each other."""
        return {
            "device": "cpu",
            "dtype": "float32",
            "threads": 1,
            "enforce_eager": self.async_depth != 2,  # else decode steps are padded, as for a GPU's graphs
            "workers": self.workers,
            "async_depth": self.async_depth,
            "decode_steps": self.decode_steps,
            "enable_chunked_prefill": self.chunked,
            "max_num_batched_tokens": _CHUNK_TOKENS if self.chunked else _MAX_MODEL_LEN,
            "max_model_len": _MAX_MODEL_LEN,
            "max_num_seqs": 32,
            "block_size": BLOCK_SIZE,
            "num_blocks": NUM_BLOCKS,
            "max_logprobs": 32,
        }


ALL_MODES = [Mode(*values) for values in itertools.product((1, 2, 3), (1, 4), (True, False), (1, 2))]

# Every pair of values of any two knobs is in one of these.
FAST_MODES = [
    Mode(1, 1, True, 1),
    Mode(1, 4, False, 2),
    Mode(2, 1, False, 1),
    Mode(2, 4, True, 2),
    Mode(3, 1, True, 2),
    Mode(3, 4, False, 1),
]
