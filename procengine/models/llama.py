"""The Llama family and those that depart from it by facts which ModelConfig states, in `decoder` most of them.

Owns: the order of operations of a forward pass. Never does: read files, hold a KV cache, or know about requests.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as functional
from torch import Tensor

from procengine.config import ModelConfig
from procengine.kernels.attention import AttentionSpec, Rotation
from procengine.kernels.linear.quantized import WeightKind
from procengine.kernels.operations import Operations
from procengine.kernels.rope import RotaryTable
from procengine.models.decoder import AttentionCallback
from procengine.models.llama_layer import Layer
from procengine.models.lora_bank import LoraPass
from procengine.models.new_tensors import Matrix, NewTensors, as_floats, rounded
from procengine.models.rotary import rotary_tables
from procengine.models.tensor_names import EMBEDDING, LM_HEAD

__all__ = ["LlamaModel"]

Rotary = tuple[Tensor, Tensor]  # cos and sin


class LlamaModel:
    """A decoder of blocks of attention with rotary positions and a gated MLP, as `Decoder` says."""

    def __init__(
        self, config: ModelConfig, new: NewTensors, operations: Operations, in_layers: NewTensors | None = None
    ) -> None:
        self._config = config
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.attention = tuple(_attention_spec(config, layer) for layer in range(config.num_layers))
        self.operations = operations
        self.embedding = new(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, index, in_layers or new, operations) for index in range(config.num_layers)]
        self.final_norm = new(config.hidden_size)
        # With tied embeddings the same tensor, or what that was rounded to.
        self.lm_head: Matrix = self.embedding
        if not config.tie_word_embeddings:
            self.lm_head = new(config.vocab_size, config.hidden_size)
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self._eps = config.rms_norm_eps
        self._facts = config.decoder
        # Rounded to the weights' dtype, as transformers does.
        self._embedding_scale = float(torch.tensor(config.decoder.embedding_scale, dtype=self.dtype))
        self._rotary = _on_device(rotary_tables(config), self.device)

    @property
    def quantization(self) -> str:
        first = self.layers[0].attention.qkv
        return "none" if isinstance(first, Tensor) else first.kind

    def replace_layer(self, index: int, new: NewTensors) -> Layer:
        self.layers[index] = Layer(self._config, index, new, self.operations)
        return self.layers[index]

    def layer_prefix(self, index: int) -> str:
        return f"model.layers.{index}."

    def outer_destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield EMBEDDING, self.embedding
        yield "model.norm.weight", self.final_norm
        if self.lm_head is not self.embedding:  # when tied, a checkpoint's own lm_head is ignored, as in Hugging Face
            yield LM_HEAD, as_floats(self.lm_head)

    def settle_outer(self) -> None:
        if self._facts.norm_offset:
            self.final_norm.add_(self._facts.norm_offset)

    def quantize_head(self, kind: WeightKind) -> None:
        self.lm_head = rounded(self.lm_head, kind)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionCallback,
        num_layers: int | None = None,
        adapters: LoraPass | None = None,
    ) -> Tensor:
        residual = functional.embedding(input_ids, self.embedding)
        if self._embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        x = self._normalised(residual, self.layers[0].input_norm)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        run = list(zip(self.layers, self._rotary, next_norms, strict=True))[:num_layers]
        for index, (layer, rotary, next_norm) in enumerate(run):
            rotation = None if rotary is None else Rotation(*rotary, positions)
            x = layer.attention(x, rotation, attention, adapters)
            x, residual = self._add(x, residual, layer.attention_output_norm, layer.mlp_norm)
            x, residual = self._add(layer.mlp(x, index, adapters), residual, layer.mlp_output_norm, next_norm)
        return x if num_layers is None else residual

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = self.operations.linear(hidden, self.lm_head, None).to(torch.float32)
        if self._facts.logits_scale != 1.0:
            logits = logits * self._facts.logits_scale
        if self._facts.logits_softcap is not None:
            logits = self._facts.logits_softcap * torch.tanh(logits / self._facts.logits_softcap)
        return logits

    def _add(
        self, x: Tensor, residual: Tensor, own_norm: Tensor | None, next_norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What a block gave goes to the residual; and what the next block takes, which comes first."""
        x = self._normalised(x, own_norm)
        if self._facts.residual_scale != 1.0:
            x = x * self._facts.residual_scale
        if next_norm is not None:
            return self.operations.add_rms_norm(x, residual, next_norm, self._eps)
        total = residual + x
        return total, total

    def _normalised(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self.operations.rms_norm(x, weight, self._eps)


def _attention_spec(config: ModelConfig, layer: int) -> AttentionSpec:
    facts = config.decoder
    scale = config.head_dim**-0.5 if facts.attention_scale is None else facts.attention_scale
    window = None if layer in facts.global_layers else config.sliding_window
    return AttentionSpec(scale, window, facts.attention_softcap, facts.is_causal)


def _on_device(tables: tuple[RotaryTable | None, ...], device: torch.device) -> tuple[Rotary | None, ...]:
    """Each table once, however many layers turn by it."""
    moved = {
        id(table): (torch.from_numpy(table.cos).to(device), torch.from_numpy(table.sin).to(device))
        for table in {id(table): table for table in tables if table is not None}.values()
    }
    return tuple(None if table is None else moved[id(table)] for table in tables)
