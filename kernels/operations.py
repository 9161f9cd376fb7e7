"""`Operations`: what a model in torch and its executor compute with, one backend of each operation.

Owns: the record, and what it holds for each backend. Never does: choose a backend (`backends` does), or compute.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from procengine.kernels.attention.metadata import AttentionMetadata
from procengine.kernels.backends import Conditions, resolve_backend
from procengine.kernels.kv_cache.quantized import KVCache
from procengine.kernels.linear.quantized import QuantizedMatrix
from procengine.kernels.linear.reference import linear
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures

__all__ = ["TORCH_OPERATIONS", "Operations", "open_operations"]

PagedAttention = Callable[[Tensor, KVCache, KVCache, AttentionMetadata, float, int | None, float | None], Tensor]
VarlenAttention = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, bool, int | None, float | None], Tensor]
Linear = Callable[[Tensor, Tensor | QuantizedMatrix, Tensor | None], Tensor]
RopeAndWrite = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, KVCache, KVCache, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Operations:
    """Functions by their meaning, which the `reference.py` (and `logprobs.py`) of each folder says.

    None changes its arguments but the caches (`write_kv`, `rope_and_write_kv`) and the logits that are to be changed;
    none waits for a GPU, but torch's attention over prompts.
    """

    names: dict[str, str]  # operation of `backends` -> backend, for the log

    linear: Linear  # `quantized_linear` where the weights are of few bits
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_tanh_and_mul: Callable[[Tensor], Tensor]
    apply_rope: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    write_kv: Callable[[Tensor, Tensor, KVCache, KVCache, Tensor], None]
    rope_and_write_kv: RopeAndWrite
    paged_attention: PagedAttention
    varlen_attention: VarlenAttention

    apply_penalties: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    apply_token_bitmask: Callable[[Tensor, Tensor, Tensor], None]
    sample: Callable[[Tensor, SamplingColumns[Tensor], SamplingFeatures], Tensor]
    gather_logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


# Where each backend has an operation. A module is imported when its backend is chosen: Triton may not be there.
_ROWWISE = {
    "rms_norm": ("norm", "reference", "triton"),
    "add_rms_norm": ("norm", "reference", "triton"),
    "silu_and_mul": ("activation", "reference", "triton"),
    "gelu_tanh_and_mul": ("activation", "reference", "triton"),
    "apply_rope": ("rope", "reference", "triton"),
    "write_kv": ("kv_cache", "reference", "triton"),
    "rope_and_write_kv": ("rope", "reference", "triton"),
    "apply_penalties": ("logits", "reference", "triton"),
    "apply_token_bitmask": ("logits", "reference", "triton"),
    "sample": ("sampling", "reference", "triton"),
    "gather_logprobs": ("sampling", "logprobs", "triton_logprobs"),
}
_ATTENTION = {"torch": "reference", "triton": "triton", "flash_attn": "flash_attn"}


def open_operations(attention_backend: str, conditions: Conditions, rowwise_backend: str = "auto") -> Operations:
    """The operations by these backends, or by the best that run.

    Raises ConfigError for a named backend that cannot run.
    """
    names = {
        "attention": resolve_backend("attention", attention_backend, conditions),
        "rowwise": resolve_backend("rowwise", rowwise_backend, conditions),
    }
    return _load(names)


def _load(names: dict[str, str]) -> Operations:
    column = 1 if names["rowwise"] == "torch" else 2
    attend = _module("attention", _ATTENTION[names["attention"]])
    return Operations(
        names=names,
        linear=_linear_of(_module("linear", "reference" if column == 1 else "triton").quantized_linear),
        paged_attention=attend.paged_attention,
        varlen_attention=attend.varlen_attention,
        **{name: getattr(_module(row[0], row[column]), name) for name, row in _ROWWISE.items()},
    )


def _linear_of(quantized_linear: Callable[[Tensor, QuantizedMatrix, Tensor | None], Tensor]) -> Linear:
    """Floats go to the vendor's matrix product, whichever the backend."""

    def run(x: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias) if isinstance(weight, Tensor) else quantized_linear(x, weight, bias)

    return run


def _module(folder: str, name: str) -> Any:
    return importlib.import_module(f"procengine.kernels.{folder}.{name}")


TORCH_OPERATIONS = _load({"attention": "torch", "rowwise": "torch"})
