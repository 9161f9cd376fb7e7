"""How large the sizes may be that a model's files claim: beyond these a file is broken, or wants our memory.

Owns: the numbers, an order of magnitude above any model there is. Never does: read a file.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MODEL_SIZE_LIMITS", "why_not_a_size"]

MODEL_SIZE_LIMITS: Final = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": 4096,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position_embeddings": (1 << 31) - 1,  # positions are int32
}


def why_not_a_size(field: str, value: object) -> str | None:
    """What is wrong with `value` as this field of ModelConfig; None if nothing is."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return f"is {value!r:.100}, not a positive number"
    limit = MODEL_SIZE_LIMITS[field]
    return f"is {value}, the limit is {limit}" if value > limit else None
