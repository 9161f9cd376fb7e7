"""What the native decoder must know of a model to say whether it can run it. Free of torch.

Owns: how ModelConfig names map to the kernel's, and which facts the kernel has no names for. Never does: look at sizes.
"""

from __future__ import annotations

from procengine.config import DecoderConfig, ModelConfig
from procengine.kernels.decoder.limits import DecoderSizes

__all__ = ["decoder_sizes", "why_not_decoder"]


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


def why_not_decoder(config: ModelConfig) -> str | None:
    """What of `config` the native decoder does not know; None if it knows all."""
    if config.architecture in ("gpt2", "transformers"):
        return "they do not have layers of this architecture"
    plain, own = DecoderConfig(), config.decoder
    unknown = [name for name in own.__struct_fields__ if getattr(own, name) != getattr(plain, name)]
    if config.rope_scaling.kind == "longrope":
        unknown.append("longrope")
    return f"they do not have {config.architecture}'s {', '.join(unknown)}" if unknown else None
