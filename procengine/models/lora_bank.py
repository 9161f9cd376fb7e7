"""`LoraBank`: the adapters that are loaded, stacked for batches in which each token has its own.

Owns: their tensors on the device. Never does: read a file, or know names: an adapter is the number of its place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from procengine.config import LoraConfig, ModelConfig
from procengine.kernels.lora import AdapterBlocks
from procengine.kernels.lora.reference import add_lora
from procengine.lora_targets import lora_matrices
from procengine.models.lora_weights import LoraWeights

__all__ = ["LoraBank", "LoraPass"]

_Stack = tuple[Tensor, Tensor]  # A [places, parts * max_rank, inputs] and B [places, outputs, parts * max_rank]


class LoraBank:
    """Room for `max_loras` adapters of up to `max_rank`. What a place has no weights for is zero.

    A matrix of ours may be several modules of the checkpoint, with an adapter for each: their A stand one below the
    other, their B in a block diagonal, so that one product serves all.
    """

    def __init__(self, model: ModelConfig, lora: LoraConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._max_rank = lora.max_rank

        def zeros(*shape: int) -> Tensor:
            return torch.zeros((lora.max_loras, *shape), dtype=dtype, device=device)

        self._layers: list[dict[str, _Stack]] = [
            {
                name: (
                    zeros(matrix.num_parts * lora.max_rank, matrix.num_inputs),
                    zeros(matrix.num_outputs, matrix.num_parts * lora.max_rank),
                )
                for name, matrix in lora_matrices(model).items()
            }
            for _ in range(model.num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        """What it takes, however many adapters there are."""
        return sum(side.nbytes for layer in self._layers for stack in layer.values() for side in stack)

    def put(self, place: int, weights: LoraWeights) -> None:
        """Let an adapter have a place, instead of the one that was there."""
        for layer in self._layers:
            for stack in layer.values():
                for side in stack:
                    side[place] = 0
        for part in weights.parts:
            target = part.target
            a, b = self._layers[part.layer][target.matrix]
            first, rank = target.part * self._max_rank, len(part.a)
            rows = slice(target.first_output, target.first_output + target.num_outputs)
            a[place, first : first + rank] = torch.from_numpy(part.a).to(a)
            b[place, rows, first : first + rank] = torch.from_numpy(part.b).to(b)

    def during(self, blocks: AdapterBlocks[Tensor]) -> LoraPass:
        """The adapters of one forward pass."""
        return LoraPass(self._layers, blocks)


class LoraPass:
    """What the projections of a forward pass add for tokens with adapters."""

    def __init__(self, layers: list[dict[str, _Stack]], blocks: AdapterBlocks[Tensor]) -> None:
        self._layers = layers
        self._blocks = blocks

    def add(self, layer: int, matrix: str, x: Tensor, y: Tensor) -> None:
        """Add to `y` [T, outputs], in place, what the tokens' adapters make of `x` [T, inputs]."""
        stack = self._layers[layer].get(matrix)  # a plain MLP among layers of experts has none
        if stack is not None:
            add_lora(y, x, *stack, self._blocks)
