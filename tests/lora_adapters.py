"""LoRA adapters of random weights as PEFT folders, and what they make of a model: its weights, merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

__all__ = ["ATTENTION", "MLP", "merged", "save_adapter"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: Any,
    folder: Path,
    seed: int,
    *,
    rank: int = 4,
    modules: Sequence[str] = (*ATTENTION, *MLP),
    std: float = 0.15,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """An adapter for those modules of `model` (transformers') whose names end in one of `modules`, in PEFT's format.

    `config` are further fields of its adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in modules:
            prefix = f"base_model.model.{name}"
            a = torch.randn(rank, module.in_features, generator=generator) * std
            b = torch.randn(module.out_features, rank, generator=generator) * std
            tensors |= {f"{prefix}.lora_A.weight": a.to(dtype), f"{prefix}.lora_B.weight": b.to(dtype)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """A copy of `model` whose weights are W + scaling * B A: the oracle of what the engine computes side by side."""
    fields = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    copy = deepcopy(model)
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            rank = a.shape[0]
            scaling = fields["lora_alpha"] / (np.sqrt(rank) if fields.get("use_rslora") else rank)
            module = copy.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            with torch.no_grad():
                module.weight += float(scaling) * (b.float() @ a.float())
    return copy
