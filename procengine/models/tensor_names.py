"""Hugging Face names of the tensors that a model has once.

Owns: them. Never does: anything else; free of torch.
"""

from __future__ import annotations

from typing import Final

__all__ = ["EMBEDDING", "LM_HEAD"]

EMBEDDING: Final = "model.embed_tokens.weight"
LM_HEAD: Final = "lm_head.weight"
