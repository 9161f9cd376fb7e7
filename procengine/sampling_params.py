"""`SamplingParams`: how the tokens of one request are chosen and where it ends. vLLM's names and defaults.

Owns: the meaning and the ranges of the parameters that do not depend on the model. Never does: look at a model,
a vocabulary or a limit of the server (that is `validation`).
"""

from __future__ import annotations

import sys

import msgspec

from procengine.errors import InvalidRequestError

__all__ = ["GREEDY_TEMPERATURE", "SamplingParams"]

GREEDY_TEMPERATURE = 1e-5  # below this, sampling is argmax: dividing logits by less overflows to infinity
_MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of one generation.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: the same seed gives the same tokens, whatever else runs; None draws one.
        stop: strings that end the text; the earliest completed match counts.
        stop_token_ids: token ids that end the generation (they are not shown in the text).
        include_stop_str_in_output: whether the matched stop string stays in the text.
        ignore_eos: go on past the model's end tokens.
        max_tokens: most new tokens; None is the room left in the context.
        logprobs: None is off; k >= 0 gives the chosen token's log probability and the k most likely ones.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidRequestError: a value is out of range (names the field, the value and the range).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, sys.float_info.max, "0 or more")
        _check_range("top_p", self.top_p, 0.0, 1.0, "more than 0 and at most 1", low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0, "between 0 and 1")
        _check_int("top_k", self.top_k, -1, None)
        _check_int("seed", self.seed, -_MAX_SEED - 1, _MAX_SEED)
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("logprobs", self.logprobs, 0, None)
        _check_list("stop_token_ids", self.stop_token_ids)
        for token_id in self.stop_ids:
            _check_int("stop_token_ids", token_id, 0, None)
        if not isinstance(self.stop, str):
            _check_list("stop", self.stop)
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise InvalidRequestError(f"stop: every stop string must be a non-empty string, got {self.stop!r}")

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
