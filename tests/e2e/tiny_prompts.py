"""The 32 prompts of the tiny models, what transformers makes of them, and which of them fit a pool together."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from procengine import SamplingParams
from tests.e2e.modes import BLOCK_SIZE, NUM_BLOCKS
from tests.e2e.oracle import GreedyRun, greedy_run
from tests.e2e.tiny_folders import VOCAB_SIZE, build_tiny_model, save_folder

__all__ = ["LENGTHS", "MAX_TOKENS", "TinyCase", "fitting_batches", "make_tiny_case", "random_prompts"]

# fmt: off
LENGTHS = [1, 2, 3, 5, 7, 9, 11, 13, 15, 15, 16, 16, 17, 17, 20, 24, 31, 31, 32, 32, 33, 33, 40, 47, 48, 49, 64, 65, 96,
           128, 200, 700]
# fmt: on
MAX_TOKENS = 25  # no multiple of the decode steps of any mode, and more than one block


def random_prompts(lengths: list[int], seed: int) -> list[list[int]]:
    """One prompt of random ids per length."""
    source = random.Random(seed)
    return [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class TinyCase:
    """A model folder with its end token; prompts in a shuffled order, and what must come out for `params` of each."""

    folder: Path
    model: Any
    eos_token_id: int
    prompts: list[list[int]]
    runs: list[GreedyRun]
    params: list[SamplingParams]
    expected: list[tuple[list[int], str]]


def make_tiny_case(family: str, folder: Path) -> TinyCase:
    """Every other prompt goes past end tokens; for the others one is chosen that ends some of them midway."""
    model = build_tiny_model(family)
    lengths = random.Random(2).sample(LENGTHS, len(LENGTHS))
    prompts = random_prompts(lengths, seed=3)
    runs = [greedy_run(model, prompt, MAX_TOKENS) for prompt in prompts]
    ignores_eos = [index % 2 == 0 for index in range(len(prompts))]
    eos = _token_that_ends_some([run for run, ignores in zip(runs, ignores_eos, strict=True) if not ignores])
    params = [SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=ignores) for ignores in ignores_eos]
    expected = [
        (run.token_ids, "length") if ignores else _until_eos(run, eos)
        for run, ignores in zip(runs, ignores_eos, strict=True)
    ]
    return TinyCase(save_folder(model, folder, eos), model, eos, prompts, runs, params, expected)


def _token_that_ends_some(runs: list[GreedyRun]) -> int:
    """The token that is in most continuations without being the first of any."""
    firsts = {run.token_ids[0] for run in runs}
    counts = Counter(token for run in runs for token in set(run.token_ids) - firsts)
    return min(counts, key=lambda token: (-counts[token], token))


def _until_eos(run: GreedyRun, eos: int) -> tuple[list[int], str]:
    return run.until(eos), "stop" if eos in run.token_ids else "length"


def fitting_batches(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Indices of prompts, in batches that one pool holds to their ends, so that nothing has to be preempted."""
    batches: list[list[int]] = [[]]
    num_free = NUM_BLOCKS
    for index, prompt in enumerate(prompts):
        num_needed = -(-(len(prompt) + max_tokens) // BLOCK_SIZE)
        assert num_needed <= NUM_BLOCKS
        if num_needed > num_free:
            batches.append([])
            num_free = NUM_BLOCKS
        batches[-1].append(index)
        num_free -= num_needed
    return batches
