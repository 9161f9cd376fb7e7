"""The rotary tables of a model.

Owns: how a ModelConfig names what `kernels.rope` needs, which layer turns by which table, and the order of dimensions
in heads that turn in part. Never does: compute frequencies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.config import ModelConfig, RopeScaling
from procengine.kernels.rope import RopeSpec, RotaryTable, make_rotary_table

__all__ = ["pairing_order", "rotary_table", "rotary_tables"]


def rotary_table(config: ModelConfig) -> RotaryTable:
    """For all positions that the model can be asked for."""
    return _table(config, config.rope_theta, config.rope_scaling)


def rotary_tables(config: ModelConfig) -> tuple[RotaryTable | None, ...]:
    """That of each layer, layers alike with the same one; None: positions do not matter to it."""
    own = rotary_table(config)
    local_theta = config.decoder.local_rope_theta
    local = own if local_theta is None else _table(config, local_theta, RopeScaling())
    return tuple(
        None if layer in config.decoder.plain_layers else own if layer in config.decoder.global_layers else local
        for layer in range(config.num_layers)
    )


def pairing_order(head_dim: int, rotary_dim: int) -> NDArray[np.int64]:
    """Where each dimension of a head comes from so that i turns with i + D/2, as the operations have it.

    Only the first R dimensions turn, and in the checkpoint i does with i + R/2. Scores do not see the order, which is
    the same for queries and keys.
    """
    dims, half, rest = np.arange(head_dim), rotary_dim // 2, -(-(head_dim - rotary_dim) // 2)
    first, second, kept, kept_too = np.split(dims, (half, rotary_dim, rotary_dim + rest))
    return np.concatenate((first, kept, second, kept_too))


def _table(config: ModelConfig, theta: float, scaling: RopeScaling) -> RotaryTable:
    spec = RopeSpec(
        head_dim=config.decoder.rotary_dim or config.head_dim,
        theta=theta,
        kind=scaling.kind,
        factor=scaling.factor,
        original_max_position_embeddings=scaling.original_max_position_embeddings or config.max_position_embeddings,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        attention_factor=scaling.attention_factor,
        truncate=scaling.truncate,
        factors=scaling.long_factors if scaling.is_long else scaling.short_factors,
    )
    # Some configs state the stretched context, some only the original one: room for either.
    max_len = max(config.max_position_embeddings, int(scaling.factor * spec.original_max_position_embeddings))
    return make_rotary_table(spec, max_len, config.head_dim)
