"""`Layer`: an attention and a feed-forward block, and the norms around them.

Owns: which norms a layer has, and their names. Never does: apply them; the model does, together with the residual.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.kernels.linear.quantized import WeightKind
from procengine.kernels.operations import Operations
from procengine.models.attention import Attention
from procengine.models.experts import Experts
from procengine.models.mlp import Mlp
from procengine.models.new_tensors import NewTensors, narrow

__all__ = ["Layer"]

# For each of `DecoderConfig.norms`: names of the norms of what goes into attention, comes out of it, and the same of
# the MLP.
_NORM_NAMES = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


class Layer:
    """One block of a decoder. A norm that the model does not have is None."""

    def __init__(self, config: ModelConfig, index: int, new: NewTensors, operations: Operations) -> None:
        facts = config.decoder
        self._norm_names = _NORM_NAMES[facts.norms]
        self._norm_offset = facts.norm_offset
        norms = [new.if_(name is not None, config.hidden_size) for name in self._norm_names]
        self.input_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm = norms
        self.attention = Attention(config, index, new, operations)
        self._mlp_name = "block_sparse_moe" if config.architecture == "mixtral" else "mlp"
        self.mlp: Mlp | Experts
        if facts.experts is not None and index in facts.experts.layers:
            self.mlp = Experts(config, facts.experts, new, operations)
        else:
            self.mlp = Mlp(config, new, operations)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        """As `Decoder.destinations`, with names inside the layer."""
        for name, tensor in zip(self._norm_names, self._norms(), strict=True):
            if tensor is not None:
                yield f"{name}.weight", tensor
        yield from self.attention.destinations()
        for name, tensor in self.mlp.destinations():
            yield f"{self._mlp_name}.{name}", tensor

    def settle(self) -> None:
        """As `Decoder.settle`."""
        for norm in self._norms():
            if norm is not None and self._norm_offset:
                norm.add_(self._norm_offset)
        self.attention.settle()

    def quantize(self, kind: WeightKind, dtype: torch.dtype) -> None:
        """As `DecoderLayer.quantize`."""
        norms = [narrow(norm, dtype) for norm in self._norms()]
        self.input_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm = norms
        self.attention.quantize(kind, dtype)
        self.mlp.quantize(kind, dtype)

    def _norms(self) -> tuple[Tensor | None, ...]:
        return self.input_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm
