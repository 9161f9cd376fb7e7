"""A seeded request draws the same tokens whatever runs beside it and however the group is set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from procengine import RequestOutput, SamplingParams
from tests.e2e.conftest import TinyGroups
from tests.e2e.modes import ALL_MODES, FAST_MODES, Mode
from tests.e2e.running_group import RunningGroup
from tests.e2e.tiny_prompts import TinyCase, random_prompts

_MAX_TOKENS = 25
_ALONE = Mode(1, 1, True, 1)  # the plain synchronous engine

_FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Narrow: with one seed a token changes only where the filter takes away the one that would be drawn.
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.5},
    "all": {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
}
_LENGTHS = [1, 2, 3, 5, 7, 8, 9, 11, 13, 15, 16, 17, 19, 20, 22, 23]  # the pool holds these sixteen, but not thirty-two


def sampled(seed: int | None, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 0.8, "seed": seed, "max_tokens": _MAX_TOKENS, "ignore_eos": True}
    return SamplingParams(**(fields | changes))


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@dataclass(frozen=True)
class Seeded:
    """Sixteen seeded requests with all filters among them, and what each of them draws when it runs alone."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    alone: list[list[int]]


@pytest.fixture(scope="module")
def seeded(tiny_groups: TinyGroups) -> Seeded:
    group = tiny_groups[_ALONE]
    filters = list(_FILTERS.values())
    prompts = random_prompts(_LENGTHS, seed=11)
    params = [sampled(100 + index, **filters[index % len(filters)]) for index in range(len(prompts))]
    alone = [
        token_ids(group.generate([prompt], of_one, cache_salt=group.new_salt()))[0]
        for prompt, of_one in zip(prompts, params, strict=True)
    ]
    assert all(len(tokens) == _MAX_TOKENS for tokens in alone)
    return Seeded(prompts, params, alone)


def test_filters_and_seeds_matter(seeded: Seeded, tiny_groups: TinyGroups) -> None:
    """Otherwise nothing below would show anything."""
    group, prompts = tiny_groups[_ALONE], seeded.prompts[:4]
    params = [sampled(5, **filters) for filters in _FILTERS.values()]
    params += [sampled(6), sampled(-6), sampled(2**63 - 1), sampled(-(2**63)), sampled(5, temperature=0.0)]
    drawn = [token_ids(group.generate([prompt] * len(params), params)) for prompt in prompts]
    by_params = [tuple(map(tuple, texts)) for texts in zip(*drawn, strict=True)]
    assert len(set(by_params)) == len(params)


def test_in_a_batch_of_sixteen(seeded: Seeded, tiny_groups: TinyGroups) -> None:
    group = tiny_groups[_ALONE]
    salt = group.new_salt()
    group.num_preemptions()
    for _ in range(2):  # the second time with prompts in the cache
        assert token_ids(group.generate(seeded.prompts, seeded.params, cache_salt=salt)) == seeded.alone
    assert group.num_preemptions() == 0


def test_between_others_that_change(seeded: Seeded, tiny_groups: TinyGroups) -> None:
    """One request in each place of a batch whose other rows are greedy or draw without a seed."""
    group = tiny_groups[_ALONE]
    mates = [sampled(None), sampled(None, top_k=3), sampled(None, temperature=0.0)]
    for place in (0, 7, 15):
        params = [mates[index % len(mates)] for index in range(16)]
        params[place] = seeded.params[2]
        prompts = list(seeded.prompts)
        prompts[place] = seeded.prompts[2]
        assert token_ids(group.generate(prompts, params))[place] == seeded.alone[2]


@pytest.mark.parametrize("mode", FAST_MODES, ids=str)
def test_in_every_mode_and_after_preemption(mode: Mode, seeded: Seeded, tiny_groups: TinyGroups) -> None:
    check_crowd(tiny_groups[mode], seeded)


def check_crowd(group: RunningGroup, seeded: Seeded) -> None:
    """All of them four times, at once: more than two pools hold."""
    group.num_preemptions()
    with group.held_until_queued(len(seeded.prompts) * 4):
        found = token_ids(group.generate(seeded.prompts * 4, seeded.params * 4))
    assert found == seeded.alone * 4
    assert group.num_preemptions() > 0


def test_without_a_seed_every_run_draws_anew(tiny_groups: TinyGroups) -> None:
    group = tiny_groups[FAST_MODES[0]]
    prompt = random_prompts([20], seed=12)[0]
    drawn = token_ids(group.generate([prompt] * 4, sampled(None)))
    drawn += token_ids(group.generate([prompt] * 4, sampled(None)))
    assert len({tuple(tokens) for tokens in drawn}) == len(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in ALL_MODES if mode not in FAST_MODES], ids=str)
def test_in_all_other_modes(mode: Mode, seeded: Seeded, tiny_llama: TinyCase) -> None:
    with RunningGroup(tiny_llama.folder, **mode.options) as group:
        check_crowd(group, seeded)
