"""Which matrices of a model take LoRA adapters, under which names adapters know them, and where these lie in ours.

Owns: that table. Never does: read an adapter. Free of torch.
"""

from __future__ import annotations

from typing import NamedTuple

from procengine.config import ModelConfig

__all__ = ["LoraMatrix", "LoraTarget", "lora_matrices", "lora_targets", "why_no_lora"]


class LoraMatrix(NamedTuple):
    """A matrix that each layer has, of up to `num_parts` matrices of the checkpoint one below the other."""

    num_outputs: int
    num_inputs: int
    num_parts: int


class LoraTarget(NamedTuple):
    """A module of the checkpoint as a part of one of our matrices: `num_outputs` rows of it from `first_output` on."""

    matrix: str  # qkv, output, gate_up or down
    part: int
    first_output: int
    num_outputs: int
    num_inputs: int


def why_no_lora(model: ModelConfig) -> str | None:
    """Why this model takes no adapters; None where it does."""
    if model.encoder is not None or "generate" not in model.workflows:
        return "adapters are for models that generate"
    if model.architecture in ("gpt2", "transformers"):
        of = "models that transformers' modules run" if model.architecture == "transformers" else "GPT-2"
        return f"there are no adapters for {of}"
    return None


def lora_matrices(model: ModelConfig) -> dict[str, LoraMatrix]:
    """The matrices of a layer that take adapters, by name. Of models with experts no MLP does."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    matrices = {"qkv": LoraMatrix(queries + 2 * keys, hidden, 3), "output": LoraMatrix(hidden, queries, 1)}
    if model.decoder.experts is None:
        matrices |= {"gate_up": LoraMatrix(2 * inner, hidden, 2), "down": LoraMatrix(hidden, inner, 1)}
    return matrices


def lora_targets(model: ModelConfig) -> dict[str, LoraTarget]:
    """The modules of a layer that take adapters, by the names that checkpoints and adapters use."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    targets = {"self_attn.o_proj": LoraTarget("output", 0, 0, hidden, queries)}
    is_fused = model.architecture == "phi3"  # in the checkpoint too
    if is_fused:
        targets["self_attn.qkv_proj"] = LoraTarget("qkv", 0, 0, queries + 2 * keys, hidden)
    else:
        targets["self_attn.q_proj"] = LoraTarget("qkv", 0, 0, queries, hidden)
        targets["self_attn.k_proj"] = LoraTarget("qkv", 1, queries, keys, hidden)
        targets["self_attn.v_proj"] = LoraTarget("qkv", 2, queries + keys, keys, hidden)
    if model.decoder.experts is not None:
        return targets
    targets["mlp.down_proj"] = LoraTarget("down", 0, 0, hidden, inner)
    if is_fused:
        targets["mlp.gate_up_proj"] = LoraTarget("gate_up", 0, 0, 2 * inner, hidden)
    else:
        targets["mlp.gate_proj"] = LoraTarget("gate_up", 0, 0, inner, hidden)
        targets["mlp.up_proj"] = LoraTarget("gate_up", 1, inner, inner, hidden)
    return targets
