"""`KVTensors`: the keys and values of all layers, in blocks.

Owns: their memory. Never does: know which block belongs to whom; the frontend does.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from procengine.config import ModelConfig

__all__ = ["KVTensors", "kv_block_bytes"]


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVTensors:
    """Keys and values of all layers, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.block_size = block_size
        self.keys = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the host from pages that come into being when they are first written, so an idle pool costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
