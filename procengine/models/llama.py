"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, told apart by the facts in ModelConfig.

Owns: the order of operations of a forward pass. Never does: read files, hold a KV cache, or know about requests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from procengine.config import ModelConfig
from procengine.kernels.attention import AttentionSpec, Rotation
from procengine.kernels.operations import TORCH_OPERATIONS, Operations
from procengine.kernels.rope import RotaryTable
from procengine.models.llama_weights import LayerWeights, LlamaWeights

__all__ = ["AttentionCallback", "LlamaModel"]

# attention(layer_index, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D], rotation) -> [T, H, D]. Queries and keys are not yet
# turned: whoever attends turns them, in the pass that stores the keys if it can. None: they are not to be turned.
AttentionCallback = Callable[[int, Tensor, Tensor, Tensor, Rotation | None], Tensor]


class LlamaModel:
    """A decoder of pre-normalised blocks: attention with rotary positions, then a gated MLP.

    Call it under `torch.inference_mode()`. `attention[i]` says how layer i attends.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        rotary: RotaryTable,
        operations: Operations = TORCH_OPERATIONS,
    ) -> None:
        self.num_layers = config.num_layers
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.attention = (AttentionSpec(config.head_dim**-0.5, config.sliding_window),) * config.num_layers
        self.max_positions = rotary.cos.shape[0]
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.operations = operations
        self.quantization = weights.quantization
        self._eps = config.rms_norm_eps
        self._weights = weights
        self._cos, self._sin = (torch.from_numpy(table).to(self.device) for table in (rotary.cos, rotary.sin))

    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionCallback) -> Tensor:
        """Hidden states after the final norm, [T, hidden_size] in the model's dtype.

        input_ids, positions: int32 or int64 [T], tokens of any number of sequences; `attention` knows which is which.
        """
        add_rms_norm = self.operations.add_rms_norm
        rotation = Rotation(self._cos, self._sin, positions)
        residual = functional.embedding(input_ids, self._weights.embedding)
        x = self.operations.rms_norm(residual, self._weights.layers[0].input_norm, self._eps)
        last = self.num_layers - 1
        for index, layer in enumerate(self._weights.layers):
            x = self._attend(index, layer, x, rotation, attention)
            x, residual = add_rms_norm(x, residual, layer.post_attention_norm, self._eps)
            x = self._mlp(layer, x)
            next_norm = self._weights.final_norm if index == last else self._weights.layers[index + 1].input_norm
            x, residual = add_rms_norm(x, residual, next_norm, self._eps)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits. hidden: [S, hidden_size], rows of `forward`'s result; returns float32 [S, vocab_size]."""
        return self.operations.linear(hidden, self._weights.lm_head, None).to(torch.float32)

    def _attend(
        self, index: int, layer: LayerWeights, x: Tensor, rotation: Rotation, attention: AttentionCallback
    ) -> Tensor:
        linear, rms_norm = self.operations.linear, self.operations.rms_norm
        heads = linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, self._eps), rms_norm(k, layer.k_norm, self._eps)
        return linear(attention(index, q, k, v, rotation).flatten(1), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        linear = self.operations.linear
        inner = self.operations.silu_and_mul(linear(x, layer.gate_up, layer.gate_up_bias))
        return linear(inner, layer.down, layer.down_bias)
