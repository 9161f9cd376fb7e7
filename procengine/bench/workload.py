"""The requests of a benchmark, made of random token ids. Pure: the same seed gives the same requests.

Owns: what one request is, and whether it fits a model. Never does: say when it is sent (`arrivals`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from procengine.errors import ConfigError

__all__ = [
    "BenchRequest",
    "Lengths",
    "check_fits",
    "misfit",
    "prefix_requests",
    "random_requests",
    "requests_of_lengths",
]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request.

    Attributes:
        prompt: a text, token ids, or a conversation (a list of messages).
        max_tokens: tokens of the answer.
        origin: where it comes from, for errors: an option, or a file and its line.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    max_tokens: int
    origin: str

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None for a text, which the group tokenizes."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], dict)):
            return None
        return len(prompt)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and answers: uniform over `[length * (1 - range_ratio), length * (1 + range_ratio)]`."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    def draw(self, generator: np.random.Generator, num_requests: int) -> tuple[list[int], list[int]]:
        """Lengths of prompts and of answers, each at least 1."""
        return (
            self._draw(generator, self.input_len, num_requests),
            self._draw(generator, self.output_len, num_requests),
        )

    def _draw(self, generator: np.random.Generator, length: int, count: int) -> list[int]:
        low = max(int(np.floor(length * (1 - self.range_ratio))), 1)
        high = int(np.ceil(length * (1 + self.range_ratio)))
        drawn: list[int] = generator.integers(low, high + 1, count).tolist()
        return drawn


def random_requests(num_requests: int, lengths: Lengths, vocab_size: int, seed: int) -> list[BenchRequest]:
    """Prompts of random token ids; no two share a beginning, so none is answered from the prefix cache."""
    generator = np.random.default_rng(seed)
    inputs, outputs = lengths.draw(generator, num_requests)
    return [
        BenchRequest(_random_ids(generator, num_tokens, vocab_size), max_tokens, "--input-len")
        for num_tokens, max_tokens in zip(inputs, outputs, strict=True)
    ]


def prefix_requests(
    num_requests: int, lengths: Lengths, prefix_len: int, num_prefixes: int, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """Prompts that begin with one of `num_prefixes` shared beginnings, in turn; `lengths` are those of what follows."""
    generator = np.random.default_rng(seed)
    prefixes = [_random_ids(generator, prefix_len, vocab_size) for _ in range(num_prefixes)]
    inputs, outputs = lengths.draw(generator, num_requests)
    return [
        BenchRequest(
            prefixes[at % num_prefixes] + _random_ids(generator, num_tokens, vocab_size),
            max_tokens,
            "--prefix-len and --input-len",
        )
        for at, (num_tokens, max_tokens) in enumerate(zip(inputs, outputs, strict=True))
    ]


def requests_of_lengths(
    lengths: Sequence[tuple[int, int]], origins: Sequence[str], vocab_size: int, seed: int
) -> list[BenchRequest]:
    """Prompts of random token ids with given lengths: (tokens of the prompt, tokens of the answer)."""
    generator = np.random.default_rng(seed)
    return [
        BenchRequest(_random_ids(generator, num_tokens, vocab_size), max_tokens, origin)
        for (num_tokens, max_tokens), origin in zip(lengths, origins, strict=True)
    ]


def misfit(request: BenchRequest, max_model_len: int) -> str | None:
    """Why a request cannot run, naming its origin; None if it can, or if only the group can tell (texts)."""
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        return f"{request.origin}: the prompt must have at least 1 token, got 0"
    if request.max_tokens < 1:
        return f"{request.origin}: the answer must have at least 1 token, got {request.max_tokens}"
    if num_prompt is not None and num_prompt + request.max_tokens > max_model_len:
        return (
            f"{request.origin}: {num_prompt} tokens of prompt and {request.max_tokens} of answer make "
            f"{num_prompt + request.max_tokens}, the context limit (max_model_len) is {max_model_len}"
        )
    return None


def check_fits(requests: Sequence[BenchRequest], max_model_len: int) -> None:
    """Refuse a work load that cannot run, before anything is measured.

    Raises:
        ConfigError: there is no request, or one does not fit the model.
    """
    if not requests:
        raise ConfigError("the work load holds no request")
    for request in requests:
        problem = misfit(request, max_model_len)
        if problem is not None:
            raise ConfigError(problem)


def _random_ids(generator: np.random.Generator, num_tokens: int, vocab_size: int) -> list[int]:
    token_ids: list[int] = generator.integers(0, vocab_size, num_tokens).tolist()
    return token_ids
