"""What the native decoder must know of a model to say whether it can run it. Free of torch.

Owns: how ModelConfig names map to the kernel's. Never does: decide.
"""

from __future__ import annotations

from procengine.config import ModelConfig
from procengine.kernels.decoder.limits import DecoderSizes

__all__ = ["decoder_sizes"]


def decoder_sizes(config: ModelConfig) -> DecoderSizes:
    """The sizes of `config`'s layers."""
    return DecoderSizes(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        sliding_window=config.sliding_window,
    )
