"""Changes to logits before sampling: penalties, biases, masks and bans.

Owns: what callers may use. Never does: arithmetic; that is in the backends' modules beside it.
"""

from __future__ import annotations

from procengine.kernels.logits.reference import (
    add_bias,
    apply_penalties,
    apply_token_bitmask,
    ban_sequences,
    ban_tokens_before,
)

__all__ = ["add_bias", "apply_penalties", "apply_token_bitmask", "ban_sequences", "ban_tokens_before"]
