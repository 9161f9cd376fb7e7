"""`Attention`: the projections around a layer's attention.

Owns: their weights and names, the norms of queries and keys, and the order of dimensions that the rotary operations
want. Never does: attend, or turn queries and keys; the caller does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.kernels.attention import Rotation
from procengine.kernels.linear.quantized import WeightKind
from procengine.kernels.operations import Operations
from procengine.models.decoder import AttentionCallback
from procengine.models.lora_bank import LoraPass
from procengine.models.new_tensors import Matrix, NewTensors, as_floats, narrow, rounded
from procengine.models.rotary import pairing_order

__all__ = ["Attention"]


class Attention:
    """Queries, keys and values of all heads are one matrix. Matrices are [out, in], as `linear` takes them."""

    def __init__(self, config: ModelConfig, index: int, new: NewTensors, operations: Operations) -> None:
        self._index = index
        self._operations = operations
        self._is_fused = config.architecture == "phi3"  # in the checkpoint too
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim, self._rotary_dim = config.head_dim, config.decoder.rotary_dim
        self._norm_is_whole = config.decoder.qk_norm_is_whole
        self._eps, self._norm_offset = config.rms_norm_eps, config.decoder.norm_offset
        sizes = [heads * config.head_dim for heads in self._heads]
        q_norm, k_norm = sizes[:2] if self._norm_is_whole else (config.head_dim, config.head_dim)
        self.qkv: Matrix = new(sum(sizes), config.hidden_size)
        self.qkv_bias = new.if_(config.qkv_bias, sum(sizes))
        self.q_norm = new.if_(config.qk_norm, q_norm)
        self.k_norm = new.if_(config.qk_norm, k_norm)
        self.output: Matrix = new(config.hidden_size, sizes[0])
        self.output_bias = new.if_(config.attention_output_bias, config.hidden_size)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        """As `Decoder.destinations`, with names inside the layer."""
        if self._is_fused:
            yield "self_attn.qkv_proj.weight", as_floats(self.qkv)
        else:
            yield from self._parts()
        for name, tensor in (
            ("q_norm.weight", self.q_norm),
            ("k_norm.weight", self.k_norm),
            ("o_proj.weight", as_floats(self.output)),
            ("o_proj.bias", self.output_bias),
        ):
            if tensor is not None:
                yield f"self_attn.{name}", tensor

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        for kind, fused in (("weight", as_floats(self.qkv)), ("bias", self.qkv_bias)):
            if fused is not None:
                sizes = [heads * self._head_dim for heads in self._heads]
                for part, rows in zip("qkv", fused.split(sizes), strict=True):
                    yield f"self_attn.{part}_proj.{kind}", rows

    def settle(self) -> None:
        """As `Decoder.settle`."""
        for norm in (self.q_norm, self.k_norm):
            if norm is not None and self._norm_offset:
                norm.add_(self._norm_offset)
        if self._rotary_dim is not None and self._rotary_dim < self._head_dim:
            order = torch.from_numpy(pairing_order(self._head_dim, self._rotary_dim)).to(self.qkv.device)
            num_turned = self._heads[0] + self._heads[1]
            for fused in (as_floats(self.qkv), self.qkv_bias):
                if fused is not None:
                    heads = fused.view(-1, self._head_dim, *fused.shape[1:])[:num_turned]
                    heads.copy_(heads[:, order])

    def quantize(self, kind: WeightKind, dtype: torch.dtype) -> None:
        """As `DecoderLayer.quantize`."""
        self.qkv, self.output = rounded(self.qkv, kind), rounded(self.output, kind)
        self.qkv_bias, self.output_bias = narrow(self.qkv_bias, dtype), narrow(self.output_bias, dtype)
        self.q_norm, self.k_norm = narrow(self.q_norm, dtype), narrow(self.k_norm, dtype)

    def __call__(
        self, x: Tensor, rotation: Rotation | None, attention: AttentionCallback, adapters: LoraPass | None = None
    ) -> Tensor:
        linear = self._operations.linear
        projected = linear(x, self.qkv, self.qkv_bias)
        if adapters is not None:
            adapters.add(self._index, "qkv", x, projected)
        heads = projected.view(x.shape[0], -1, self._head_dim)
        q, k, v = heads.split(self._heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normalised(q, self.q_norm), self._normalised(k, self.k_norm)
        attended = attention(self._index, q, k, v, rotation).flatten(1)
        out = linear(attended, self.output, self.output_bias)
        if adapters is not None:
            adapters.add(self._index, "output", attended, out)
        return out

    def _normalised(self, heads: Tensor, weight: Tensor) -> Tensor:
        rms_norm = self._operations.rms_norm
        if self._norm_is_whole:
            return rms_norm(heads.flatten(1), weight, self._eps).view(heads.shape)
        return rms_norm(heads, weight, self._eps)
