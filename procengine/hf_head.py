"""The labels that a config.json names, and what makes scores of their logits: `read_labels`, `head_activation`.

Owns: those keys. Never does: know where a model's labels come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from procengine.hf_files import HuggingFaceFolder

__all__ = ["head_activation", "read_labels"]


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """By their numbers."""
    named = config.get("id2label")
    if isinstance(named, dict):
        by_id = {int(key): str(label) for key, label in named.items()}
        return tuple(by_id.get(index, f"LABEL_{index}") for index in range(max(by_id) + 1))
    return tuple(f"LABEL_{index}" for index in range(int(config.get("num_labels", 2))))


def head_activation(
    folder: HuggingFaceFolder, config: Mapping[str, Any], num_labels: int
) -> Literal["softmax", "sigmoid", "identity"]:
    """What the model's files say of it, else sentence-transformers' and transformers' rule."""
    own = (config.get("sentence_transformers") or {}).get("activation_fn")
    own = own or config.get("sbert_ce_default_activation_function")
    if own is not None:
        known: dict[str, Literal["sigmoid", "identity"]] = {"Sigmoid": "sigmoid", "Identity": "identity"}
        name = str(own).rpartition(".")[2]
        if name not in known:
            raise folder.error(f"activation_fn {own!r} is not supported; supported: {', '.join(known)}")
        return known[name]
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or num_labels == 1 else "softmax"
