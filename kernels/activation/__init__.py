"""Gated activations.

Owns: what callers may use. Never does: arithmetic; that is in the backends' modules beside it.
"""

from __future__ import annotations

from procengine.kernels.activation.reference import silu_and_mul

__all__ = ["silu_and_mul"]
