"""Compiles every Triton kernel for a GPU that need not be there, and says what it takes. Run as a program, by a test.

The interpreter runs a kernel as Python; the compiler refuses what is not its language. A launch is caught where Triton
would hand it to the driver, and its arguments say what to compile.
"""

from __future__ import annotations

import inspect
import json
import sys
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from procengine.kernels.activation import triton as activation
from procengine.kernels.attention import triton as attention
from procengine.kernels.attention.metadata import AttentionMetadata
from procengine.kernels.kv_cache import triton as kv_cache
from procengine.kernels.kv_cache.quantized import KVCache, QuantizedKind, open_cache
from procengine.kernels.linear import triton as linear
from procengine.kernels.linear.quantized import WeightKind, quantize
from procengine.kernels.logits import triton as logits_kernels
from procengine.kernels.norm import triton as norm
from procengine.kernels.rope import triton as rope
from procengine.kernels.sampling import SamplingFeatures
from procengine.kernels.sampling import triton as sampling
from procengine.kernels.sampling.triton_logprobs import gather_logprobs
from tests.kernels.test_sampling import ALL, tensors

KINDS: tuple[WeightKind, ...] = ("int8", "int4", "fp8")
CACHES: tuple[QuantizedKind | None, ...] = (None, "int8", "fp8")
_STARTS = torch.tensor([0, 1, 2, 4], dtype=torch.int32)
HOPPER = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def _compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    bound = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
    types = {p.name: "constexpr" if p.is_constexpr else _type_of(bound[p.name]) for p in kernel.params}
    constants = {(p.num,): bound[p.name] for p in kernel.params if p.is_constexpr}
    compiled = triton.compile(ASTSource(kernel, types, constants, {}), target=HOPPER, options=options)
    line = {"kernel": kernel.fn.__name__, "shared": compiled.metadata.shared, "ptx": len(compiled.asm["ptx"])}
    sys.stdout.write(json.dumps(line) + "\n")


def launch_all(dtype: torch.dtype) -> None:
    """Every kernel in the shapes of an 8B model, with every feature on and off."""
    x, weight, slots = torch.randn(4, 4096, dtype=dtype), torch.randn(4096, dtype=dtype), torch.arange(4)
    norm.rms_norm(x, weight, 1e-5)
    norm.add_rms_norm(x, x, weight, 1e-5)
    activation.silu_and_mul(x)
    activation.gelu_tanh_and_mul(x)
    q, k, v = torch.randn(4, 48, 128, dtype=dtype).split((32, 8, 8), 1)
    cosine, positions = torch.randn(100, 64), torch.arange(4, dtype=torch.int32)
    rope.apply_rope(q, k, cosine, cosine, positions)
    for cache in map(partial(_cache, dtype), CACHES):
        rope.rope_and_write_kv(q, k, v, cosine, cosine, positions, cache, cache, slots)
        kv_cache.write_kv(k, v, cache, cache, slots)
    for kind in KINDS:
        matrix = quantize(torch.randn(48, 4096), kind)
        # In a small tile, in a large one, and with weights written out; of the others, what differs is in the first.
        for num_rows in (1, 100, 200) if kind == "int4" else (1,):
            linear.quantized_linear(x[:1].repeat(num_rows, 1), matrix, weight[:48])
    for longest, window, softcap in ((100, 50, 30.0), (2000, None, None)):  # one split, and several
        for cache in map(partial(_cache, dtype), CACHES):
            attention.paged_attention(q, cache, cache, _meta(longest, slots), 0.1, window, softcap)
    for own in CACHES[1:]:  # in float16 their values are read in another way
        cache = _cache(torch.float16, own)
        attention.paged_attention(q.half(), cache, cache, _meta(2000, slots), 0.1)
    attention.varlen_attention(q, k, v, _STARTS, 2, 0.1, causal=False)
    for head_dim, other in ((256, torch.bfloat16), (512, torch.bfloat16), (128, torch.float32), (256, torch.float32)):
        wide = torch.zeros(4, 2, head_dim, dtype=other)  # whose tiles take most memory
        attention.varlen_attention(wide, wide, wide, _STARTS, 2, 0.1)
    rows = torch.randn(3, 128256)
    sampling.sample(rows, tensors(3, top_k=3, top_p=0.5, min_p=0.1), ALL)
    sampling.sample(rows, tensors(3, temperature=0.0), SamplingFeatures.NONE)
    gather_logprobs(rows, torch.tensor([1, 2, 3], dtype=torch.int32), 5)
    counts = torch.zeros(rows.shape, dtype=torch.int32)
    named = torch.arange(3)
    logits_kernels.apply_penalties(rows, named, counts, counts > 0, named, torch.ones(3, 3))
    logits_kernels.apply_token_bitmask(rows, torch.tensor([1]), torch.zeros(1, 4008, dtype=torch.int32))


def _meta(longest: int, slots: Tensor) -> AttentionMetadata:
    """Two rows that decode, and one of two tokens."""
    lengths, tables = torch.tensor([longest, 3, 5], dtype=torch.int32), torch.zeros(3, 200, dtype=torch.int32)
    return AttentionMetadata(2, _STARTS, lengths, tables, slots, max_query_len=2, max_seq_len=longest)


def _cache(dtype: torch.dtype, kind: QuantizedKind | None) -> KVCache:
    if kind is None:
        return torch.zeros(64, 16, 8, 128, dtype=dtype)
    return open_cache(torch.zeros(64, 16, 8, 132, dtype=torch.int8), kind)


if __name__ == "__main__":
    JITFunction.run = _compile
    launch_all(torch.bfloat16)
