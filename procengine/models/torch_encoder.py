"""A bidirectional encoder in torch: in float32 what the native kernels are tested against, and what runs on a GPU.

Owns: the arithmetic of BERT, RoBERTa and ModernBERT (Devlin et al. 2018, Liu et al. 2019, Warner et al. 2024). Never
does: read a checkpoint (`encoder_weights`), or pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from procengine.models.encoder_weights import EncoderCheckpoint

__all__ = ["TorchEncoder"]

_Tensors = SimpleNamespace  # the fields of `EncoderBlock` or `EncoderEmbedding`, as tensors

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


class TorchEncoder:
    """Whole sequences, one behind the other, each attended by itself."""

    def __init__(self, checkpoint: EncoderCheckpoint, dtype: torch.dtype, device: str) -> None:
        config, self._config = checkpoint.config, checkpoint.encoder
        self._num_heads, self._head_dim = config.num_heads, config.head_dim
        self.device = torch.device(device)
        to_tensor = partial(_to_tensor, dtype=dtype, device=self.device)
        self._outside = _tensors(checkpoint.embedding(), to_tensor)
        self._blocks = [_tensors(checkpoint.block(index), to_tensor) for index in range(config.num_layers)]

    def forward(
        self, input_ids: Tensor, token_types: Tensor | None, lengths: list[int], num_layers: int | None = None
    ) -> Tensor:
        """Hidden states, [T, hidden]. input_ids, token_types: int [T]; num_layers: how many are run, None is all."""
        x = self._embed(input_ids, token_types, lengths)
        for block in self._blocks[:num_layers]:
            x = self._pre_norm(block, x, lengths) if self._config.is_pre_norm else self._post_norm(block, x, lengths)
        is_whole = num_layers is None or num_layers == len(self._blocks)
        final, bias = self._outside.final_norm, self._outside.final_norm_bias
        return self._norm(x, final, bias) if is_whole and final is not None else x

    def _embed(self, input_ids: Tensor, token_types: Tensor | None, lengths: list[int]) -> Tensor:
        tables = self._outside
        x = functional.embedding(input_ids, tables.tokens)
        if tables.types is not None:
            types = torch.zeros_like(input_ids) if token_types is None else token_types
            x = x + functional.embedding(types, tables.types)
        if tables.positions is not None:
            x = x + torch.cat([tables.positions[:length] for length in lengths])
        return self._norm(x, tables.norm, tables.norm_bias)

    def _post_norm(self, block: _Tensors, x: Tensor, lengths: list[int]) -> Tensor:
        x = self._norm(x + self._attend(block, x, lengths), block.attention_norm, block.attention_norm_bias)
        return self._norm(x + self._feed_forward(block, x), block.mlp_norm, block.mlp_norm_bias)

    def _pre_norm(self, block: _Tensors, x: Tensor, lengths: list[int]) -> Tensor:
        normed = x if block.attention_norm is None else self._norm(x, block.attention_norm, block.attention_norm_bias)
        x = x + self._attend(block, normed, lengths)
        return x + self._feed_forward(block, self._norm(x, block.mlp_norm, block.mlp_norm_bias))

    def _norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, self._config.norm_eps)

    def _feed_forward(self, block: _Tensors, x: Tensor) -> Tensor:
        inner, activation = functional.linear(x, block.up, block.up_bias), _ACTIVATIONS[self._config.activation]
        if self._config.is_gated:
            first, second = inner.chunk(2, dim=-1)
            inner = activation(first) * second
        else:
            inner = activation(inner)
        return functional.linear(inner, block.down, block.down_bias)

    def _attend(self, block: _Tensors, x: Tensor, lengths: list[int]) -> Tensor:
        qkv = functional.linear(x, block.qkv, block.qkv_bias).view(-1, 3, self._num_heads, self._head_dim)
        mixed = torch.cat([self._attend_one(block, one) for one in qkv.split(lengths)])
        return functional.linear(mixed, block.output, block.output_bias)

    def _attend_one(self, block: _Tensors, qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(1, 2, 0, 3)  # each [heads, n, head_dim]
        if block.cos is not None and block.sin is not None:
            length = qkv.shape[0]
            q, k = (_turned(part, block.cos[:length], block.sin[:length]) for part in (q, k))
        mask = None
        if block.window >= 0:
            at = torch.arange(qkv.shape[0], device=qkv.device)
            mask = (at[:, None] - at[None, :]).abs() <= block.window
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return mixed.transpose(0, 1).reshape(qkv.shape[0], -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _to_tensor(values: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """What is no array stays."""
    return torch.from_numpy(values).to(device, dtype) if isinstance(values, np.ndarray) else values


def _tensors(arrays: Any, to_tensor: Callable[[Any], Any]) -> _Tensors:
    return _Tensors(**{field.name: to_tensor(getattr(arrays, field.name)) for field in fields(arrays)})
