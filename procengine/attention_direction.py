"""Which tokens a decoder's tokens see: those before them, or, of one made an embedder, all: `with_direction`.

Owns: what such a model can still do, and which can be one (BehnamGhader et al. 2024, LLM2Vec, arXiv:2404.05961). Never
does: attend.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from procengine.config import ModelConfig
from procengine.errors import ConfigError

__all__ = ["with_direction"]

_TAKE_A_NEXT_TOKEN: Final = ("generate", "score_text")


def with_direction(model: ModelConfig, bidirectional: bool | None) -> ModelConfig:
    """`model` as was asked for; None: as its files say.

    Raises:
        ConfigError: it cannot be so.
    """
    if model.encoder is not None:
        if bidirectional is False:
            raise ConfigError(f"bidirectional: {model.name} is an encoder, whose tokens see all others")
        return model
    wanted = not model.decoder.is_causal if bidirectional is None else bidirectional
    if not wanted:
        return replace(model, decoder=replace(model.decoder, is_causal=True))
    if model.architecture == "transformers" or model.sliding_window is not None:
        what = "has a sliding window" if model.sliding_window is not None else "runs on transformers' modules"
        raise ConfigError(f"bidirectional: {model.name} {what}, and attends to earlier tokens only")
    kept = tuple(
        name
        for name in model.workflows
        if name not in _TAKE_A_NEXT_TOKEN and not (name == "score" and model.score_token_ids)
    )
    return replace(model, workflows=kept, score_token_ids=(), decoder=replace(model.decoder, is_causal=False))
