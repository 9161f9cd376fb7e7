"""Writes to the KV cache by the native library, on the CPU, with the rotation that comes before fused in.

Owns: the checks that the C function relies on. Never does: arithmetic, or tell the order of elements within a block,
which is between `native/kv_cache.h` and the native attention.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from procengine.kernels.native import library
from procengine.kernels.native.arguments import address, argument_structure
from procengine.kernels.native.torch_dtypes import DTYPES, KV_CACHE_DTYPES
from procengine.kernels.rope import RotaryTable

__all__ = ["head_dim_of", "rotate_and_write_kv", "why_not", "write_kv"]

_MAX_HEAD_DIM = 512
_INT8_SCALE_BYTES = 4

_Arguments = argument_structure(
    "KVWriteArgs",
    "q k v keys values q_norm k_norm cos sin positions slot_mapping",
    "q_stride k_stride v_stride num_tokens",
    "num_heads num_kv_heads head_dim block_size dtype kv_dtype",
    "eps",
)


def why_not(head_dim: int, block_size: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot have such a cache; None where they can."""
    if dtype not in KV_CACHE_DTYPES:
        return f"a KV cache of {dtype} is not supported; there are float32, bfloat16 and int8"
    if dtype == torch.int8 and head_dim % 4:
        return f"head_dim must be a multiple of 4 for a KV cache of int8, not {head_dim}"
    if head_dim % 2 or not 2 <= head_dim <= _MAX_HEAD_DIM:
        return f"head_dim must be even and at most {_MAX_HEAD_DIM}, not {head_dim}"
    if block_size % 2:
        return f"block_size must be even, not {block_size}"
    return None


def head_dim_of(cache: Tensor) -> int:
    """D of a cache of any dtype."""
    return cache.shape[3] - _INT8_SCALE_BYTES if cache.dtype == torch.int8 else cache.shape[3]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """As the reference, but that only the native attention can read the cache, whose dtype need not be k's.

    An int8 cache is [num_blocks, block_size, Hkv, D + 4]: what it keeps is `reference.quantize`d, and has its scale.
    """
    _write(_arguments(k, v, k_cache, v_cache, slot_mapping))


def rotate_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    table: RotaryTable,
    positions: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate q in place; rotate k and write it, and v, to their slots. With norms, both are normalised first.

    q: [T, H, D], k, v: [T, Hkv, D], of one dtype, float32 or bfloat16, tokens any distance apart; k_cache, v_cache,
    slot_mapping: as `write_kv`; positions: int64 [T], below the table's length; q_norm, k_norm: [D], of q's dtype.
    """
    assert q.stride()[1:] == (q.shape[2], 1)
    assert q.dtype == k.dtype
    assert positions.is_contiguous()
    assert positions.dtype == torch.int64
    assert table.cos.shape[1] * 2 == q.shape[2]
    for norm in (q_norm, k_norm):
        assert norm is None or (norm.dtype == q.dtype and norm.is_contiguous())
    arguments = _arguments(k, v, k_cache, v_cache, slot_mapping)
    arguments.q = q.data_ptr()
    arguments.q_stride = q.stride(0)
    arguments.num_heads = q.shape[1]
    arguments.q_norm = None if q_norm is None else q_norm.data_ptr()
    arguments.k_norm = None if k_norm is None else k_norm.data_ptr()
    arguments.cos = address(table.cos)
    arguments.sin = address(table.sin)
    arguments.positions = positions.data_ptr()
    arguments.eps = eps
    _write(arguments)


def _arguments(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> Any:
    block_size, num_kv_heads, head_dim = *k_cache.shape[1:3], head_dim_of(k_cache)
    reason = why_not(head_dim, block_size, k_cache.dtype)
    assert reason is None, reason
    assert k.dtype in DTYPES
    assert k.dtype == v.dtype
    assert k_cache.dtype == v_cache.dtype
    assert k.shape == v.shape == (slot_mapping.shape[0], num_kv_heads, head_dim)
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()
    return _Arguments(
        k=k.data_ptr(),
        v=v.data_ptr(),
        keys=k_cache.data_ptr(),
        values=v_cache.data_ptr(),
        slot_mapping=slot_mapping.data_ptr(),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        num_tokens=k.shape[0],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=DTYPES[k.dtype],
        kv_dtype=KV_CACHE_DTYPES[k_cache.dtype],
    )


def _write(arguments: Any) -> None:
    _function()(ctypes.byref(arguments))


@cache
def _function() -> Any:
    return library.native_function("pe_write_kv", None, ctypes.POINTER(_Arguments))
