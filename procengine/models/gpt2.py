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
from procengine.kernels.operations import Operations
from procengine.models.decoder import AttentionCallback
from procengine.models.new_tensors import NewTensors
from procengine.models.tensor_names import LM_HEAD

__all__ = ["Gpt2Model"]


@dataclass(frozen=True, slots=True)
class _Affine:
    """A weight and a bias. Checkpoints have matrices as [in, out], we as [out, in]."""

    name: str
    weight: Tensor
    bias: Tensor

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.weight", self.weight.T if self.weight.dim() == 2 else self.weight
        yield f"{self.name}.bias", self.bias


class _Layer:
    """One block."""

    def __init__(self, config: ModelConfig, new: NewTensors) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_norm = _Affine("ln_1", new(hidden), new(hidden))
        self.qkv = _Affine("attn.c_attn", new(3 * hidden, hidden), new(3 * hidden))
        self.output = _Affine("attn.c_proj", new(hidden, hidden), new(hidden))
        self.mlp_norm = _Affine("ln_2", new(hidden), new(hidden))
        self.up = _Affine("mlp.c_fc", new(inner, hidden), new(inner))
        self.down = _Affine("mlp.c_proj", new(hidden, inner), new(hidden))

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        for part in (self.input_norm, self.qkv, self.output, self.mlp_norm, self.up, self.down):
            yield from part.destinations()


class Gpt2Model:
    """As `Decoder` says (Radford et al. 2019, Language Models are Unsupervised Multitask Learners)."""

    def __init__(self, config: ModelConfig, new: NewTensors, operations: Operations) -> None:
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.operations = operations
        scale = config.head_dim**-0.5 if config.decoder.attention_scale is None else config.decoder.attention_scale
        self.attention = (AttentionSpec(scale),) * config.num_layers
        self.embedding = new(config.vocab_size, config.hidden_size)
        self.positions = new(config.max_position_embeddings, config.hidden_size)
        self.layers = tuple(_Layer(config, new) for _ in range(config.num_layers))
        self.final_norm = _Affine("ln_f", new(config.hidden_size), new(config.hidden_size))
        self.lm_head = self.embedding if config.tie_word_embeddings else new(config.vocab_size, config.hidden_size)
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self._eps = config.rms_norm_eps

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield "transformer.wte.weight", self.embedding
        yield "transformer.wpe.weight", self.positions
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.destinations():
                yield f"transformer.h.{index}.{name}", tensor
        for name, tensor in self.final_norm.destinations():
            yield f"transformer.{name}", tensor
        if self.lm_head is not self.embedding:
            yield LM_HEAD, self.lm_head

    def settle(self) -> None:
        """Nothing is written in another form."""

    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionCallback) -> Tensor:
        embedded, placed = functional.embedding(input_ids, self.embedding), self.positions[positions]
        x = embedded + placed
        for index, layer in enumerate(self.layers):
            heads = self._linear(self._normalised(x, layer.input_norm), layer.qkv).view(x.shape[0], -1, self.head_dim)
            q, k, v = heads.chunk(3, dim=1)
            x = x + self._linear(attention(index, q, k, v, None).flatten(1), layer.output)
            inner = functional.gelu(self._linear(self._normalised(x, layer.mlp_norm), layer.up), approximate="tanh")
            x = x + self._linear(inner, layer.down)
        return self._normalised(x, self.final_norm)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.operations.linear(hidden, self.lm_head, None).to(torch.float32)

    def _linear(self, x: Tensor, matrix: _Affine) -> Tensor:
        return self.operations.linear(x, matrix.weight, matrix.bias)

    def _normalised(self, x: Tensor, norm: _Affine) -> Tensor:
        return functional.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, self._eps)
