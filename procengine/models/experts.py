"""`Experts`: a feed-forward block of many experts, of which a router picks a few for each token.

Owns: their weights and names, the routing, and one pass over the tokens of each expert. Never does: run on a GPU
without a wait, for which experts have tokens is known there only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from procengine.config import ExpertsConfig, ModelConfig
from procengine.kernels.linear.quantized import WeightKind
from procengine.kernels.operations import Operations
from procengine.models.lora_bank import LoraPass
from procengine.models.mlp import Mlp, gated_activation
from procengine.models.new_tensors import Matrix, NewTensors, as_floats, narrow, rounded

__all__ = ["Experts"]


class Experts:
    """Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538), with a shared one beside them if the model has it."""

    def __init__(self, config: ModelConfig, facts: ExpertsConfig, new: NewTensors, operations: Operations) -> None:
        self._facts = facts
        self._linear = operations.linear
        self._activate = gated_activation(config, operations)
        self._names = _MIXTRAL if config.architecture == "mixtral" else _QWEN
        num, size, hidden = facts.num_experts, facts.intermediate_size, config.hidden_size
        self.router = new(num, hidden)
        self.gate_up: list[Matrix] = [new(2 * size, hidden) for _ in range(num)]
        self.down: list[Matrix] = [new(hidden, size) for _ in range(num)]
        shared_size = facts.shared_intermediate_size
        self.shared = Mlp(config, new, operations, shared_size) if shared_size else None
        self.shared_gate = new.if_(bool(shared_size), 1, hidden)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        """As `Decoder.destinations`, with names inside the block."""
        gate, up, down = self._names
        yield "gate.weight", self.router
        for expert, (gate_up, own_down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            own_gate, own_up = as_floats(gate_up).chunk(2)
            yield f"experts.{expert}.{gate}.weight", own_gate
            yield f"experts.{expert}.{up}.weight", own_up
            yield f"experts.{expert}.{down}.weight", as_floats(own_down)
        if self.shared is not None and self.shared_gate is not None:
            yield "shared_expert_gate.weight", self.shared_gate
            for name, tensor in self.shared.destinations():
                yield f"shared_expert.{name}", tensor

    def quantize(self, kind: WeightKind, dtype: torch.dtype) -> None:
        """As `DecoderLayer.quantize`; the router and the shared expert's gate stay floats."""
        self.gate_up = [rounded(matrix, kind) for matrix in self.gate_up]
        self.down = [rounded(matrix, kind) for matrix in self.down]
        self.router, self.shared_gate = self.router.to(dtype), narrow(self.shared_gate, dtype)
        if self.shared is not None:
            self.shared.quantize(kind, dtype)

    def __call__(self, x: Tensor, layer: int = 0, adapters: LoraPass | None = None) -> Tensor:
        del layer, adapters  # which take none of their matrices
        weights, chosen = self._route(x)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():  # in ascending order, so that sums do not depend on the batch
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            inner = self._activate(self._linear(x[tokens], self.gate_up[expert], None))
            own = self._linear(inner, self.down[expert], None) * weights[tokens, places, None]
            out.index_add_(0, tokens, own)
        if self.shared is not None and self.shared_gate is not None:
            out += self._linear(x, self.shared_gate, None).sigmoid() * self.shared(x)
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in x's dtype and numbers of each token's experts, both [T, k]."""
        shares = self._linear(x, self.router, None).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = shares.topk(self._facts.num_experts_per_token, dim=-1)
        if self._facts.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen


# Names of an expert's gate, up and down.
_QWEN = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")
