"""GPT-2: learned positions, layer norms with biases, and an MLP without a gate.

Owns: its weights, their names, and the order of operations of a forward pass. Never does: read files, hold a KV cache,
or know about requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from procengine.config import ModelConfig
from procengine.kernels.attention import AttentionSpec
from procengine.kernels.linear.quantized import WeightKind
from procengine.kernels.operations import Operations
from procengine.models.decoder import AttentionCallback
from procengine.models.new_tensors import Matrix, NewTensors, as_floats, rounded
from procengine.models.tensor_names import LM_HEAD

__all__ = ["Gpt2Model"]


@dataclass(slots=True)
class _Norm:
    """A layer norm."""

    name: str
    weight: Tensor
    bias: Tensor

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.weight", self.weight
        yield f"{self.name}.bias", self.bias

    def quantize(self, kind: WeightKind, dtype: torch.dtype) -> None:
        self.weight, self.bias = self.weight.to(dtype), self.bias.to(dtype)


@dataclass(slots=True)
class _Linear:
    """A matrix, [out, in], which checkpoints have the other way round, and a bias."""

    name: str
    weight: Matrix
    bias: Tensor

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.weight", as_floats(self.weight).T
        yield f"{self.name}.bias", self.bias

    def quantize(self, kind: WeightKind, dtype: torch.dtype) -> None:
        self.weight, self.bias = rounded(self.weight, kind), self.bias.to(dtype)


class _Layer:
    """One block."""

    def __init__(self, config: ModelConfig, new: NewTensors) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_norm = _Norm("ln_1", new(hidden), new(hidden))
        self.qkv = _Linear("attn.c_attn", new(3 * hidden, hidden), new(3 * hidden))
        self.output = _Linear("attn.c_proj", new(hidden, hidden), new(hidden))
        self.mlp_norm = _Norm("ln_2", new(hidden), new(hidden))
        self.up = _Linear("mlp.c_fc", new(inner, hidden), new(inner))
        self.down = _Linear("mlp.c_proj", new(hidden, inner), new(hidden))

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        for part in self._parts():
            yield from part.destinations()

    def settle(self) -> None:
        """Nothing is written in another form."""

    def quantize(self, kind: WeightKind, dtype: torch.dtype) -> None:
        for part in self._parts():
            part.quantize(kind, dtype)

    def _parts(self) -> tuple[_Norm | _Linear, ...]:
        return self.input_norm, self.qkv, self.output, self.mlp_norm, self.up, self.down


class Gpt2Model:
    """As `Decoder` says (Radford et al. 2019, Language Models are Unsupervised Multitask Learners)."""

    def __init__(
        self, config: ModelConfig, new: NewTensors, operations: Operations, in_layers: NewTensors | None = None
    ) -> None:
        self._config = config
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.operations = operations
        scale = config.head_dim**-0.5 if config.decoder.attention_scale is None else config.decoder.attention_scale
        self.attention = (AttentionSpec(scale, is_causal=config.decoder.is_causal),) * config.num_layers
        self.embedding = new(config.vocab_size, config.hidden_size)
        self.positions = new(config.max_position_embeddings, config.hidden_size)
        self.layers = [_Layer(config, in_layers or new) for _ in range(config.num_layers)]
        self.final_norm = _Norm("ln_f", new(config.hidden_size), new(config.hidden_size))
        self.lm_head: Matrix = self.embedding
        if not config.tie_word_embeddings:
            self.lm_head = new(config.vocab_size, config.hidden_size)
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self._eps = config.rms_norm_eps

    @property
    def quantization(self) -> str:
        first = self.layers[0].qkv.weight
        return "none" if isinstance(first, Tensor) else first.kind

    def replace_layer(self, index: int, new: NewTensors) -> _Layer:
        self.layers[index] = _Layer(self._config, new)
        return self.layers[index]

    def layer_prefix(self, index: int) -> str:
        return f"transformer.h.{index}."

    def outer_destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield "transformer.wte.weight", self.embedding
        yield "transformer.wpe.weight", self.positions
        for name, tensor in self.final_norm.destinations():
            yield f"transformer.{name}", tensor
        if self.lm_head is not self.embedding:
            yield LM_HEAD, as_floats(self.lm_head)

    def settle_outer(self) -> None:
        """Nothing is written in another form."""

    def quantize_head(self, kind: WeightKind) -> None:
        self.lm_head = rounded(self.lm_head, kind)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionCallback, num_layers: int | None = None
    ) -> Tensor:
        embedded, placed = functional.embedding(input_ids, self.embedding), self.positions[positions]
        x = embedded + placed
        for index, layer in enumerate(self.layers[:num_layers]):
            heads = self._linear(self._normalised(x, layer.input_norm), layer.qkv).view(x.shape[0], -1, self.head_dim)
            q, k, v = heads.chunk(3, dim=1)
            x = x + self._linear(attention(index, q, k, v, None).flatten(1), layer.output)
            inner = functional.gelu(self._linear(self._normalised(x, layer.mlp_norm), layer.up), approximate="tanh")
            x = x + self._linear(inner, layer.down)
        return self._normalised(x, self.final_norm) if num_layers is None else x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.operations.linear(hidden, self.lm_head, None).to(torch.float32)

    def _linear(self, x: Tensor, matrix: _Linear) -> Tensor:
        return self.operations.linear(x, matrix.weight, matrix.bias)

    def _normalised(self, x: Tensor, norm: _Norm) -> Tensor:
        return functional.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, self._eps)
