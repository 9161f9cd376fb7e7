"""The tensors of a Llama-family model, and where each comes from in a checkpoint.

Owns: shapes, fusion (q|k|v and gate|up are one matrix each) and Hugging Face names. Never does: read or compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.kernels.linear.quantized import QuantizedMatrix, WeightKind, quantize
from procengine.models.tensor_names import EMBEDDING, LM_HEAD

__all__ = [
    "LayerWeights",
    "LlamaWeights",
    "Matrix",
    "allocate_layer",
    "allocate_weights",
    "layer_destinations",
    "quantized_layer",
    "weight_destinations",
]

Matrix = Tensor | QuantizedMatrix


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Matrices are [out, in], as `linear` takes them; what a model does not have is None."""

    input_norm: Tensor
    qkv: Matrix  # [(H + 2 Hkv) D, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    output: Matrix  # [hidden, H D]
    output_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Matrix  # [2 I, hidden]
    gate_up_bias: Tensor | None
    down: Matrix  # [hidden, I]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """The whole model. With tied embeddings `lm_head` is `embedding`, the same tensor, or what that was rounded to."""

    embedding: Tensor  # [V, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Matrix

    @property
    def quantization(self) -> str:
        """How the blocks' matrices are rounded."""
        first = self.layers[0].qkv
        return "none" if isinstance(first, Tensor) else first.kind


def allocate_weights(config: ModelConfig, dtype: torch.dtype, device: str | torch.device) -> LlamaWeights:
    """Uninitialised tensors of the final shapes."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    embedding = empty(config.vocab_size, config.hidden_size)
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(allocate_layer(config, dtype, device) for _ in range(config.num_layers)),
        final_norm=empty(config.hidden_size),
        lm_head=embedding if config.tie_word_embeddings else empty(config.vocab_size, config.hidden_size),
    )


def allocate_layer(config: ModelConfig, dtype: torch.dtype, device: str | torch.device) -> LayerWeights:
    """Uninitialised tensors of one block."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def empty_if(wanted: bool, size: int) -> Tensor | None:
        return empty(size) if wanted else None

    return LayerWeights(
        input_norm=empty(hidden),
        qkv=empty(q_size + 2 * kv_size, hidden),
        qkv_bias=empty_if(config.qkv_bias, q_size + 2 * kv_size),
        q_norm=empty_if(config.qk_norm, config.head_dim),
        k_norm=empty_if(config.qk_norm, config.head_dim),
        output=empty(hidden, q_size),
        output_bias=empty_if(config.attention_output_bias, hidden),
        post_attention_norm=empty(hidden),
        gate_up=empty(2 * inner, hidden),
        gate_up_bias=empty_if(config.mlp_bias, 2 * inner),
        down=empty(hidden, inner),
        down_bias=empty_if(config.mlp_bias, hidden),
    )


def weight_destinations(config: ModelConfig, weights: LlamaWeights) -> Iterator[tuple[str, Tensor]]:
    """Every checkpoint tensor the model needs, with the (slice of a) tensor it fills. Together they fill all."""
    yield EMBEDDING, weights.embedding
    for index, layer in enumerate(weights.layers):
        yield from layer_destinations(config, layer, index)
    yield "model.norm.weight", weights.final_norm
    if not config.tie_word_embeddings:  # when tied, a checkpoint's own lm_head is ignored, as Hugging Face does
        yield LM_HEAD, _floats(weights.lm_head)


def layer_destinations(config: ModelConfig, layer: LayerWeights, index: int) -> Iterator[tuple[str, Tensor]]:
    """The same of the block of that index."""
    for name, tensor in _destinations_in_layer(config, layer):
        yield f"model.layers.{index}.{name}", tensor


def quantized_layer(layer: LayerWeights, kind: WeightKind, dtype: torch.dtype) -> LayerWeights:
    """The block with its matrices rounded to `kind`, and its vectors to `dtype`."""

    def rounded(matrix: Matrix) -> QuantizedMatrix:
        return quantize(_floats(matrix), kind)

    def narrow(vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector.to(dtype)

    return LayerWeights(
        input_norm=layer.input_norm.to(dtype),
        qkv=rounded(layer.qkv),
        qkv_bias=narrow(layer.qkv_bias),
        q_norm=narrow(layer.q_norm),
        k_norm=narrow(layer.k_norm),
        output=rounded(layer.output),
        output_bias=narrow(layer.output_bias),
        post_attention_norm=layer.post_attention_norm.to(dtype),
        gate_up=rounded(layer.gate_up),
        gate_up_bias=narrow(layer.gate_up_bias),
        down=rounded(layer.down),
        down_bias=narrow(layer.down_bias),
    )


def _floats(matrix: Matrix) -> Tensor:
    assert isinstance(matrix, Tensor), "a checkpoint is read into floats"
    return matrix


def _destinations_in_layer(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    whole: dict[str, Tensor | None] = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "self_attn.o_proj.weight": _floats(layer.output),
        "self_attn.o_proj.bias": layer.output_bias,
        "post_attention_layernorm.weight": layer.post_attention_norm,
        "mlp.down_proj.weight": _floats(layer.down),
        "mlp.down_proj.bias": layer.down_bias,
    }
    for name, tensor in whole.items():
        if tensor is not None:
            yield name, tensor
    fused = (("weight", _floats(layer.qkv), _floats(layer.gate_up)), ("bias", layer.qkv_bias, layer.gate_up_bias))
    for kind, qkv, gate_up in fused:
        if qkv is not None:
            for part, rows in zip("qkv", qkv.split((q_size, kv_size, kv_size)), strict=True):
                yield f"self_attn.{part}_proj.{kind}", rows
        if gate_up is not None:
            for part, rows in zip(("gate", "up"), gate_up.split(inner), strict=True):
                yield f"mlp.{part}_proj.{kind}", rows
