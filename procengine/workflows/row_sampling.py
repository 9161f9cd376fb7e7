"""From `SamplingParams` to what a row of the worker needs: the checks against this model, the feature bits, the rules.

Owns: which parameter switches on which feature. Never does: tokenize, or plan.
"""

from __future__ import annotations

import numpy as np

from procengine.config import LimitsConfig
from procengine.errors import InvalidRequestError
from procengine.request import RowRules, RowSampling
from procengine.row_features import (
    BAD_WORDS,
    BIAS,
    EARLY_STOPS,
    GRAMMAR,
    MIN_P,
    PENALTIES,
    RANDOM,
    TOP_K,
    TOP_P,
)
from procengine.sampling_params import SamplingParams
from procengine.workflows.prompt import ModelFacts

__all__ = ["check_params", "check_sizes", "row_rules", "row_sampling"]

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def check_params(params: SamplingParams, facts: ModelFacts) -> None:
    """Refuse what this model or these limits do not allow.

    Raises:
        InvalidRequestError: names the field, the value and the limit.
    """
    check_sizes(params, facts.limits)
    num_allowed = len(params.allowed_token_ids or ())
    if num_allowed > facts.vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids: at most {facts.vocab_size} ids (the vocabulary) are allowed, got {num_allowed}"
        )
    for field, token_ids in (
        ("stop_token_ids", params.stop_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", tuple(params.logit_bias or ())),
    ):
        for token_id in token_ids:
            if token_id >= facts.vocab_size:
                raise InvalidRequestError(
                    f"{field}: {token_id} is not a token of this model; ids go from 0 to {facts.vocab_size - 1}"
                )


def row_sampling(params: SamplingParams, drawn_seed: int, index: int, vocab_size: int) -> RowSampling:
    """The values of choice `index`."""
    seed = (drawn_seed if params.seed is None else params.seed) + index
    features = _logits_features(params)
    temperature, top_k, top_p, min_p = 0.0, 0, 1.0, 0.0  # greedy: nothing else matters
    if not params.is_greedy:
        temperature, top_p, min_p = min(params.temperature, _MAX_FLOAT32), params.top_p, params.min_p
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        features |= RANDOM
        features |= TOP_K if top_k else 0
        features |= TOP_P if top_p < 1.0 else 0
        features |= MIN_P if min_p > 0.0 else 0
    return RowSampling(
        seed=(seed + 2**63) % 2**64 - 2**63,  # the largest seed plus an index wraps around, as int64 does
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        features=features,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
    )


def row_rules(
    params: SamplingParams, stop_token_ids: tuple[int, ...], bad_words: tuple[tuple[int, ...], ...]
) -> RowRules:
    """The rules about single tokens; the same for all choices."""
    return RowRules(
        logit_bias=tuple((params.logit_bias or {}).items()),
        allowed_token_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        early_stop_ids=stop_token_ids if params.min_tokens else (),
        bad_words=bad_words,
    )


def _logits_features(params: SamplingParams) -> int:
    has_penalty = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    features = PENALTIES if has_penalty else 0
    features |= BIAS if params.logit_bias or params.allowed_token_ids is not None else 0
    features |= BAD_WORDS if params.bad_words else 0
    if params.structured_outputs is not None:
        return features | GRAMMAR  # a grammar alone says when the text may end: a ban could leave it no token at all
    features |= EARLY_STOPS if params.min_tokens else 0
    return features


def check_sizes(params: SamplingParams, limits: LimitsConfig) -> None:
    """Refuse more than these limits allow; needs no model. Raises InvalidRequestError with field, value and limit."""
    stops, words = params.stop_strings, params.bad_words or ()
    for field, unit, value, limit in (
        ("n", "choices", params.n, limits.max_n),
        ("stop", "stop strings", len(stops), limits.max_stop_strings),
        ("stop", "bytes in all", sum(len(stop.encode()) for stop in stops), limits.max_stop_bytes),
        ("stop_token_ids", "ids", len(params.stop_ids), limits.max_stop_token_ids),
        ("bad_words", "words", len(words), limits.max_bad_words),
        ("bad_words", "bytes in all", sum(len(word.encode()) for word in words), limits.max_stop_bytes),
        ("logit_bias", "entries", len(params.logit_bias or ()), limits.max_logit_bias),
        ("logprobs", "alternatives", params.logprobs or 0, limits.max_logprobs),
        ("prompt_logprobs", "alternatives", params.prompt_logprobs or 0, limits.max_logprobs),
    ):
        if value > limit:
            raise InvalidRequestError(f"{field}: at most {limit} {unit} are allowed, got {value}")
