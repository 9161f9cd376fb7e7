"""What a row asks of the sampler beyond argmax, as bits that both sides of the wire know.

Owns: the bits. The lowest four are those of `kernels.sampling.SamplingFeatures`. Plain integers, for numpy.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ADAPTER",
    "BAD_WORDS",
    "BIAS",
    "EARLY_STOPS",
    "GRAMMAR",
    "MIN_P",
    "NEEDS_HISTORY",
    "NEEDS_LOGITS_STATE",
    "PENALTIES",
    "RANDOM",
    "SAMPLING",
    "TOP_K",
    "TOP_P",
]

RANDOM: Final = 1
TOP_K: Final = 2
TOP_P: Final = 4
MIN_P: Final = 8
PENALTIES: Final = 16  # presence, frequency or repetition penalty
BIAS: Final = 32  # logit_bias or allowed_token_ids
EARLY_STOPS: Final = 64  # min_tokens: end tokens are masked before a position
BAD_WORDS: Final = 128
GRAMMAR: Final = 256  # a token mask comes with every step, so the row's newest token must be known to plan it
ADAPTER: Final = 512  # a LoRA adapter changes the forward pass

SAMPLING: Final = RANDOM | TOP_K | TOP_P | MIN_P
NEEDS_HISTORY: Final = PENALTIES | BAD_WORDS
NEEDS_LOGITS_STATE: Final = PENALTIES | BIAS | EARLY_STOPS | BAD_WORDS
