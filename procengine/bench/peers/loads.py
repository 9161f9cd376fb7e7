"""The work loads that engines are compared on, and their prompts. Pure: the same text and seed give the same prompts.

Owns: W1 to W5, and that no two prompts share a beginning that a prefix cache could answer. Never does: tokenize, run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from procengine.bench.arrivals import arrival_times
from procengine.errors import ConfigError

__all__ = ["WORKLOADS", "Figure", "Load", "PromptSource", "Workload", "make_load", "select_workloads", "warmup_load"]

_BEGINNING: Final = 16  # tokens: the smallest block that the prefix cache of any engine here shares
_MAX_DRAWS: Final = 10_000
_VARIED_SEED: Final = 7


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run.

    Attributes:
        path: where it stands in the figures of `answers`, with dots.
        unit: for people.
        is_better_high: False for times.
    """

    path: str
    unit: str
    is_better_high: bool


_OUTPUT_RATE: Final = Figure("output_tokens_per_s", "output tok/s", is_better_high=True)
_TTFT_P99: Final = Figure("ttft_ms.p99", "TTFT p99 ms", is_better_high=False)
_ITL_P99: Final = Figure("itl_ms.p99", "ITL p99 ms", is_better_high=False)


@dataclass(frozen=True, slots=True)
class Workload:
    """What every engine is asked to do; all answers have exactly `output_len` tokens.

    Attributes:
        input_lens: tokens of each prompt, without a shared prefix.
        prefix_len: tokens that all prompts of a run begin with.
        is_streaming: whether each token's time is wanted; else engines may use their fastest offline call.
        max_concurrency: most requests under way; None is no limit.
        request_rate: Poisson arrivals a second; None: as soon as `max_concurrency` allows.
        figures: what is compared, the most important first.
    """

    name: str
    summary: str
    input_lens: tuple[int, ...]
    output_len: int
    figures: tuple[Figure, ...]
    prefix_len: int = 0
    is_streaming: bool = False
    max_concurrency: int | None = None
    request_rate: float | None = None


_VARIED_LENS: Final = tuple(np.random.default_rng(_VARIED_SEED).integers(32, 257, 64).tolist())

WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload(
            "w1",
            "1 request of 128 tokens, 256 out",
            (128,),
            256,
            (
                Figure("decode_tokens_per_s", "decode tok/s", is_better_high=True),
                Figure("ttft_ms.p50", "TTFT ms", False),
            ),
            is_streaming=True,
        ),
        Workload("w2", "64 requests of 32..256 tokens, 128 out each, all at once", _VARIED_LENS, 128, (_OUTPUT_RATE,)),
        Workload(
            "w3",
            "8 requests of 1024 tokens, 1 out",
            (1024,) * 8,
            1,
            (Figure("prompt_tokens_per_s", "prompt tok/s", is_better_high=True),),
        ),
        Workload(
            "w4",
            "32 requests that share 768 tokens and have 32 of their own, 16 out",
            (32,) * 32,
            16,
            (Figure("wall_s", "s", is_better_high=False),),
            prefix_len=768,
        ),
        Workload(
            "w5",
            "the prompts of w2, 64 out, 16 at a time, streaming",
            _VARIED_LENS,
            64,
            (
                _OUTPUT_RATE,
                Figure("ttft_ms.p50", "TTFT p50 ms", is_better_high=False),
                _TTFT_P99,
                Figure("itl_ms.p50", "ITL p50 ms", is_better_high=False),
                _ITL_P99,
            ),
            is_streaming=True,
            max_concurrency=16,
        ),
        Workload(
            "w5-poisson",
            "the same, 4 requests a second (Poisson arrivals)",
            _VARIED_LENS,
            64,
            (_TTFT_P99, _ITL_P99),
            is_streaming=True,
            request_rate=4.0,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Load:
    """One run of a work load: what engines get. All engines of a run get the same.

    Attributes:
        prompts: token ids of each request.
        arrivals_s: float64 [requests], ascending seconds after the start; None: no plan.
    """

    prompts: list[list[int]]
    output_len: int
    is_streaming: bool = False
    max_concurrency: int | None = None
    arrivals_s: NDArray[np.float64] | None = None


class PromptSource:
    """Pieces of a text, no two of which begin alike, however many are taken.

    Args:
        token_ids: int [tokens], the text.
    """

    def __init__(self, token_ids: NDArray[np.int32], seed: int) -> None:
        self._token_ids = token_ids
        self._generator = np.random.default_rng(seed)
        self._beginnings: set[bytes] = set()

    def take(self, num_tokens: int) -> list[int]:
        """The next piece, token ids [num_tokens].

        Raises:
            ConfigError: the text is too short, or used up.
        """
        num_places = self._token_ids.size - max(num_tokens, _BEGINNING) + 1
        if num_places < 1:
            raise ConfigError(f"a prompt of {num_tokens} tokens was asked for, the text has {self._token_ids.size}")
        for _ in range(_MAX_DRAWS):
            at = int(self._generator.integers(num_places))
            beginning = self._token_ids[at : at + _BEGINNING].tobytes()
            if beginning not in self._beginnings:
                self._beginnings.add(beginning)
                piece: list[int] = self._token_ids[at : at + num_tokens].tolist()
                return piece
        raise ConfigError(f"the text of {self._token_ids.size} tokens has no more beginnings that were not used")


def make_load(workload: Workload, source: PromptSource, seed: int) -> Load:
    """The next run of a work load; `seed` is that of its arrivals."""
    prefix = source.take(workload.prefix_len) if workload.prefix_len else []
    rate = workload.request_rate
    return Load(
        prompts=[prefix + source.take(length) for length in workload.input_lens],
        output_len=workload.output_len,
        is_streaming=workload.is_streaming,
        max_concurrency=workload.max_concurrency,
        arrivals_s=None if rate is None else arrival_times(len(workload.input_lens), rate, 1.0, seed),
    )


def warmup_load(source: PromptSource, *, is_streaming: bool) -> Load:
    """Short, but of many shapes: an engine pays once for each kind of step (compiled kernels, buffers)."""
    return Load([source.take(length) for length in (16, 32, 64, 128, 256, 512, 1024, 48)], 8, is_streaming)


def select_workloads(names: Sequence[str]) -> list[Workload]:
    """Work loads by name.

    Raises:
        ConfigError: there is none of that name.
    """
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"--workloads: {name!r} is none of {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in names]
