"""`SamplingParams`: how the tokens of one request are chosen and where it ends. vLLM's names and defaults.

Owns: the meaning and the ranges of the parameters that do not depend on the model. Never does: look at a model,
a vocabulary or a limit of the server (that is `validation`).
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import msgspec

from procengine.errors import InvalidRequestError
from procengine.structured.spec import StructuredOutputs

__all__ = ["GREEDY_TEMPERATURE", "SamplingParams"]

GREEDY_TEMPERATURE = 1e-5  # below this, sampling is argmax: dividing logits by less overflows to infinity
_MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of one generation.

    Attributes:
        n: choices to generate for the prompt, whose blocks they share; choice i has seed + i.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        presence_penalty: taken off the logit of every token that the output has, in [-2, 2].
        frequency_penalty: taken off the logit of a token for each time that the output has it, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or output have.
        seed: the same seed gives the same tokens, whatever else runs; None draws one.
        stop: strings that end the text; the earliest completed match counts.
        stop_token_ids: token ids that end the generation (they are not shown in the text).
        bad_words: words that are not generated, with or without a space before them.
        logit_bias: added to the logits of these token ids, in [-100, 100].
        allowed_token_ids: no other token is generated.
        include_stop_str_in_output: whether the matched stop string stays in the text.
        ignore_eos: go on past the model's end tokens.
        max_tokens: most new tokens; None is the room left in the context.
        min_tokens: no end or stop before this many new tokens.
        logprobs: None is off; k >= 0 gives the chosen token's log probability and the k most likely ones.
        prompt_logprobs: the same for the tokens of the prompt.
        detokenize: whether there is a text at all.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: has no effect. It is taken because callers of vLLM send it; with a tokenizer of
            the `tokenizers` library (a "fast" one) it has none there either, nor in transformers' `decode`.
        truncate_prompt_tokens: keep the last k tokens of the prompt; -1 keeps what the context limit allows.
        structured_outputs: what the text must look like.
        output_kind: "delta": each message has what is new; "cumulative": all so far; "final": one message at the end.
        stream_interval: tokens between two messages, at least.

    Raises:
        InvalidRequestError: a value is out of range (names the field, the value and the range).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    output_kind: Literal["delta", "cumulative", "final"] = "delta"
    stream_interval: int = 1

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, None)
        _check_range("temperature", self.temperature, 0.0, sys.float_info.max, "0 or more")
        _check_range("top_p", self.top_p, 0.0, 1.0, "more than 0 and at most 1", low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0, "between 0 and 1")
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0, "between -2 and 2")
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "between -2 and 2")
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 1e6, "more than 0", low_open=True)
        _check_int("top_k", self.top_k, -1, None)
        _check_int("seed", self.seed, -_MAX_SEED - 1, _MAX_SEED)
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        _check_int("logprobs", self.logprobs, 0, None)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, None)
        _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None)
        _check_int("stream_interval", self.stream_interval, 1, None)
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        _check_token_ids("allowed_token_ids", self.allowed_token_ids)
        _check_strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        _check_strings("bad_words", self.bad_words)
        _check_logit_bias(self.logit_bias)
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens: must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens: must be at least 1, or -1, got 0")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids: must not be empty")
        if not self.detokenize and self.stop_strings:
            raise InvalidRequestError("stop: stop strings need detokenize, which is false")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, also when one string was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple, also when there are none."""
        return tuple(self.stop_token_ids or ())

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE


def _check_range(field: str, value: float, low: float, high: float, allowed: str, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{field}: must be a number, got {value!r}")
    if not low <= value <= high or (low_open and value == low):  # NaN compares as false
        raise InvalidRequestError(f"{field}: must be finite and {allowed}, got {value!r}")


def _check_token_ids(field: str, value: object) -> None:
    _check_list(field, value)
    token_ids: Any = value or ()
    if set(map(type, token_ids)) <= {int} and min(token_ids, default=0) >= 0:
        return  # a million of them must not hold up the frontend
    for token_id in token_ids:
        _check_int(field, token_id, 0, None)


def _check_strings(field: str, value: object) -> None:
    _check_list(field, value)
    if any(not isinstance(text, str) or not text for text in value or ()):  # type: ignore[attr-defined]
        raise InvalidRequestError(f"{field}: every entry must be a non-empty string, got {value!r}")


def _check_logit_bias(value: object) -> None:
    if value is not None and not isinstance(value, dict):
        raise InvalidRequestError(f"logit_bias: must be a map from token id to number, got {value!r}")
    for token_id, bias in (value or {}).items():
        _check_int("logit_bias", token_id, 0, None)
        _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0, "between -100 and 100")


def _check_list(field: str, value: object) -> None:
    if value is not None and not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{field}: must be a list, got {value!r}")


def _check_int(field: str, value: int | None, low: int, high: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{field}: must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{field}: must be {limit}, got {value!r}")
