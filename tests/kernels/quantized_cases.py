"""Contexts of any shape in a cache of 8 bits, and what that holds of them in floats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from procengine.kernels.kv_cache import reference
from procengine.kernels.kv_cache.quantized import QuantizedCache, QuantizedKind, open_cache
from tests.kernels.attention_cases import Case, make_case

__all__ = ["DTYPES", "KINDS", "QuantizedCase", "empty_cache", "make_quantized", "rounded"]

KINDS: list[QuantizedKind] = ["int8", "fp8"]
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def empty_cache(shape: tuple[int, int, int, int], kind: QuantizedKind) -> QuantizedCache:
    """[num_blocks, block_size, Hkv, D], of the bits of NaN."""
    return open_cache(torch.full((*shape[:3], shape[3] + 4), -1, dtype=torch.int8), kind)


def rounded(heads: Tensor, kind: QuantizedKind) -> Tensor:
    numbers, scales = reference.quantize(heads, DTYPES[kind])
    return numbers.float() * scales


@dataclass
class QuantizedCase:
    """`floats`: the same with contexts as the cache holds them."""

    keys: QuantizedCache
    values: QuantizedCache
    floats: Case


def make_quantized(kind: QuantizedKind, *args: Any, **options: Any) -> QuantizedCase:
    """As `make_case`; what is NaN there has a scale of NaN here."""
    case = make_case(*args, **options)
    shape = case.k_cache.shape
    keys, values = (empty_cache((shape[0], shape[1], shape[2], shape[3]), kind) for _ in range(2))
    slots = torch.arange(shape[0] * shape[1])
    reference.write_kv(case.k_cache.flatten(0, 1), case.v_cache.flatten(0, 1), keys, values, slots)
    contexts = [(rounded(k, kind), rounded(v, kind)) for k, v in case.contexts]
    return QuantizedCase(keys, values, replace(case, contexts=contexts))
