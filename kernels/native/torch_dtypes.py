"""The element types of tensors, as the library numbers them.

Owns: that table, for wrappers that take tensors. Never does: anything else.
"""

from __future__ import annotations

import torch

__all__ = ["DTYPES", "KV_CACHE_DTYPES"]

# `pe::DType`, of those that row-wise kernels and attention take.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# Of those that a KV cache may have.
KV_CACHE_DTYPES = {**DTYPES, torch.int8: 3}
