"""The rotary table of a model.

Owns: how a ModelConfig names what `kernels.rope` needs. Never does: compute frequencies.
"""

from __future__ import annotations

from procengine.config import ModelConfig
from procengine.kernels.rope import RopeSpec, RotaryTable, make_rotary_table

__all__ = ["rotary_table"]


def rotary_table(config: ModelConfig) -> RotaryTable:
    """For all positions that the model can be asked for."""
    scaling = config.rope_scaling
    spec = RopeSpec(
        head_dim=config.head_dim,
        theta=config.rope_theta,
        kind=scaling.kind,
        factor=scaling.factor,
        original_max_position_embeddings=scaling.original_max_position_embeddings or config.max_position_embeddings,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        attention_factor=scaling.attention_factor,
        truncate=scaling.truncate,
    )
    # Some configs state the stretched context, some only the original one: room for either.
    max_len = max(config.max_position_embeddings, int(scaling.factor * spec.original_max_position_embeddings))
    return make_rotary_table(spec, max_len)
