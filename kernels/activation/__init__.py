"""Gated activations.

Owns: what callers may use. Never does: arithmetic; that is in the backends' modules beside it.
"""

from __future__ import annotations

from procengine.kernels.activation.reference import gelu_tanh_and_mul, silu_and_mul

__all__ = ["gelu_tanh_and_mul", "silu_and_mul"]
