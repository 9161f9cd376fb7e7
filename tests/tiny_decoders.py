"""Tiny random decoders with labels behind them as Hugging Face folders."""

from __future__ import annotations

from typing import Any

import torch

from tests.e2e.tiny_folders import FAMILIES, base_config

__all__ = ["build_tiny_classifier"]


def build_tiny_classifier(family: str, kind: str, num_labels: int, **changes: Any) -> Any:
    """A float32 `...For{kind}` of transformers with random weights; the same one every time. `kind` is
    "SequenceClassification" or "TokenClassification"."""
    import transformers

    prefix, own = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**base_config(), **own, "num_labels": num_labels, **changes})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        model = getattr(transformers, f"{prefix}For{kind}")(config).eval().float()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model
