"""`Mlp`: a gated feed-forward block.

Owns: its weights, their names, and its two projections. Never does: choose among experts (`experts` does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.kernels.linear.quantized import WeightKind
from procengine.kernels.operations import Operations
from procengine.models.lora_bank import LoraPass
from procengine.models.new_tensors import Matrix, NewTensors, as_floats, narrow, rounded

__all__ = ["Mlp", "gated_activation"]


def gated_activation(config: ModelConfig, operations: Operations) -> Callable[[Tensor], Tensor]:
    """What the model makes of gate | up."""
    return operations.silu_and_mul if config.decoder.activation == "silu" else operations.gelu_tanh_and_mul


class Mlp:
    """Gate and up are one matrix, [2 I, hidden]."""

    def __init__(self, config: ModelConfig, new: NewTensors, operations: Operations, size: int | None = None) -> None:
        size = config.intermediate_size if size is None else size
        self._linear = operations.linear
        self._activate = gated_activation(config, operations)
        self._is_fused = config.architecture == "phi3"  # in the checkpoint too
        self.gate_up: Matrix = new(2 * size, config.hidden_size)
        self.gate_up_bias = new.if_(config.mlp_bias, 2 * size)
        self.down: Matrix = new(config.hidden_size, size)
        self.down_bias = new.if_(config.mlp_bias, config.hidden_size)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        """As `Decoder.destinations`, with names inside the block."""
        if self._is_fused:
            yield "gate_up_proj.weight", as_floats(self.gate_up)
        else:
            yield from self._parts()
        yield "down_proj.weight", as_floats(self.down)
        if self.down_bias is not None:
            yield "down_proj.bias", self.down_bias

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        for kind, fused in (("weight", as_floats(self.gate_up)), ("bias", self.gate_up_bias)):
            if fused is not None:
                gate, up = fused.chunk(2)
                yield f"gate_proj.{kind}", gate
                yield f"up_proj.{kind}", up

    def quantize(self, kind: WeightKind, dtype: torch.dtype) -> None:
        """As `DecoderLayer.quantize`."""
        self.gate_up, self.down = rounded(self.gate_up, kind), rounded(self.down, kind)
        self.gate_up_bias, self.down_bias = narrow(self.gate_up_bias, dtype), narrow(self.down_bias, dtype)

    def __call__(self, x: Tensor, layer: int = 0, adapters: LoraPass | None = None) -> Tensor:
        gate_up = self._linear(x, self.gate_up, self.gate_up_bias)
        if adapters is not None:
            adapters.add(layer, "gate_up", x, gate_up)
        inner = self._activate(gate_up)
        out = self._linear(inner, self.down, self.down_bias)
        if adapters is not None:
            adapters.add(layer, "down", inner, out)
        return out
