"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, told apart by the facts in ModelConfig.

Owns: the order of operations of a forward pass. Never does: read files, hold a KV cache, or know about requests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from procengine.config import ModelConfig
from procengine.kernels.activation import silu_and_mul
from procengine.kernels.linear.reference import linear
from procengine.kernels.norm import add_rms_norm, rms_norm
from procengine.kernels.rope import RotaryTable
from procengine.kernels.rope.reference import apply_rope
from procengine.models.llama_weights import LayerWeights, LlamaWeights

__all__ = ["AttentionCallback", "LlamaModel"]

# attention(layer_index, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, H, D]
AttentionCallback = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class LlamaModel:
    """A decoder of pre-normalised blocks: attention with rotary positions, then a gated MLP.

    Call it under `torch.inference_mode()`.
    """

    def __init__(self, config: ModelConfig, weights: LlamaWeights, rotary: RotaryTable) -> None:
        self.num_layers = config.num_layers
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale: float = config.head_dim**-0.5
        self.sliding_window = config.sliding_window
        self.max_positions = rotary.cos.shape[0]
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._eps = config.rms_norm_eps
        self._weights = weights
        self._cos, self._sin = (torch.from_numpy(table).to(self.device) for table in (rotary.cos, rotary.sin))

    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionCallback) -> Tensor:
        """Hidden states after the final norm, [T, hidden_size] in the model's dtype.

        input_ids, positions: int32 or int64 [T], tokens of any number of sequences; `attention` knows which is which.
        """
        residual = functional.embedding(input_ids, self._weights.embedding)
        x = rms_norm(residual, self._weights.layers[0].input_norm, self._eps)
        last = self.num_layers - 1
        for index, layer in enumerate(self._weights.layers):
            x = self._attend(index, layer, x, positions, attention)
            x, residual = add_rms_norm(x, residual, layer.post_attention_norm, self._eps)
            x = self._mlp(layer, x)
            next_norm = self._weights.final_norm if index == last else self._weights.layers[index + 1].input_norm
            x, residual = add_rms_norm(x, residual, next_norm, self._eps)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits. hidden: [S, hidden_size], rows of `forward`'s result; returns float32 [S, vocab_size]."""
        return linear(hidden, self._weights.lm_head).to(torch.float32)

    def _attend(
        self, index: int, layer: LayerWeights, x: Tensor, positions: Tensor, attention: AttentionCallback
    ) -> Tensor:
        heads = linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, self._eps), rms_norm(k, layer.k_norm, self._eps)
        q, k = apply_rope(q, k, self._cos, self._sin, positions)
        return linear(attention(index, q, k, v).flatten(1), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        return linear(silu_and_mul(linear(x, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias)
