"""Which models the native decoder can run. Free of torch, so that the configuration can be resolved without it.

Owns: the sizes and their limits. Never does: look for the library.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecoderSizes", "why_not"]

_MAX_HEAD_DIM = 512
_MAX_GROUP = 64  # query heads that share a kv head


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What the layers have in common; the names are those of ModelConfig."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    sliding_window: int | None


def why_not(sizes: DecoderSizes, block_size: int) -> str | None:
    """Why this model cannot run natively, over a cache of such blocks; None where it can."""
    for name, value in (
        ("hidden_size", sizes.hidden_size),
        ("intermediate_size", sizes.intermediate_size),
        ("num_heads * head_dim", sizes.num_heads * sizes.head_dim),
    ):
        if value % 32:
            return f"{name} must be a multiple of 32, not {value}"
    if block_size % 2:
        return f"block_size must be even, not {block_size}"
    if sizes.head_dim % 2 or sizes.head_dim > _MAX_HEAD_DIM:
        return f"head_dim must be even and at most {_MAX_HEAD_DIM}, not {sizes.head_dim}"
    if sizes.num_heads % sizes.num_kv_heads or sizes.num_heads // sizes.num_kv_heads > _MAX_GROUP:
        return (
            f"num_heads must be a multiple of num_kv_heads, at most {_MAX_GROUP} times, "
            f"not {sizes.num_heads} and {sizes.num_kv_heads}"
        )
    return None
