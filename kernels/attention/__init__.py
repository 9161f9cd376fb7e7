"""Attention over the paged KV cache, and over packed sequences without one.

Owns: what callers may use. Never does: arithmetic; that is in the backends' modules beside it.
"""

from __future__ import annotations

from procengine.kernels.attention.metadata import AttentionMetadata
from procengine.kernels.attention.reference import paged_attention, varlen_attention
from procengine.kernels.attention.spec import AttentionSpec, Rotation

__all__ = ["AttentionMetadata", "AttentionSpec", "Rotation", "paged_attention", "varlen_attention"]
