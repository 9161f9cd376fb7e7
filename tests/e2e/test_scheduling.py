"""SCH-02, -03, -05 and -06 of shared/cases.md: preemption, async scheduling and shared prefixes change no token."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from procengine import RequestOutput, SamplingParams
from procengine.outputs import StreamDelta
from tests.e2e.conftest import TinyGroups
from tests.e2e.modes import BLOCK_SIZE, FAST_MODES, NUM_BLOCKS, Mode
from tests.e2e.running_group import RunningGroup, joined
from tests.e2e.smollm2 import P2, SMOLLM2_OPTIONS
from tests.e2e.tiny_folders import VOCAB_SIZE
from tests.e2e.tiny_prompts import TinyCase, random_prompts

_ALONE = Mode(1, 1, True, 1)  # the plain synchronous engine
_CROWD = [15, 16, 17, 31, 32, 33, 47, 48, 49]
_NUM_REQUESTS, _NUM_TOKENS = 24, 40


def greedy(max_tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@dataclass(frozen=True)
class Crowd:
    """Prompts around block borders, more than a pool holds with their answers; and what each gives alone."""

    prompts: list[list[int]]
    alone: list[list[int]]


def run_alone(group: RunningGroup, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    return [tokens_of(group.generate([ids], greedy(max_tokens), cache_salt=group.new_salt()))[0] for ids in prompts]


@pytest.fixture(scope="module")
def crowd(tiny_groups: TinyGroups) -> Crowd:
    prompts = random_prompts([_CROWD[at % len(_CROWD)] for at in range(_NUM_REQUESTS)], seed=21)
    return Crowd(prompts, run_alone(tiny_groups[_ALONE], prompts, _NUM_TOKENS))


def stream_all(group: RunningGroup, prompts: list[list[int]]) -> list[list[StreamDelta]]:
    """All streams at once, a thread each, with a cold cache."""
    results: list[list[StreamDelta]] = [[] for _ in prompts]
    salt = group.new_salt()

    def run(at: int) -> None:
        results[at].extend(group.client.stream(prompts[at], greedy(_NUM_TOKENS), cache_salt=salt))

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(prompts))]
    with group.held_until_queued(len(prompts)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def check_no_block_is_lost(group: RunningGroup) -> None:
    """One request that needs every block of a pool can still run."""
    prompt = [7] * (NUM_BLOCKS * BLOCK_SIZE - 1)
    for _ in range(group.config.worker.num_workers):
        assert len(tokens_of(group.generate([prompt], greedy(1), cache_salt=group.new_salt()))[0]) == 1


def check_crowd(group: RunningGroup, crowd: Crowd) -> None:
    """All at once, then again with what that has left in the cache. They must preempt each other."""
    salt = group.new_salt()
    group.num_preemptions()
    for _ in range(2):
        with group.held_until_queued(len(crowd.prompts)):
            outputs = group.generate(crowd.prompts, greedy(_NUM_TOKENS), cache_salt=salt)
        assert tokens_of(outputs) == crowd.alone
        assert group.num_preemptions() > 0


def check_streams(group: RunningGroup, crowd: Crowd) -> None:
    """The same as streams: every token once."""
    group.num_preemptions()
    for deltas, alone in zip(stream_all(group, crowd.prompts), crowd.alone, strict=True):
        _, token_ids, finish_reason, _ = joined(deltas)
        assert (token_ids, finish_reason) == (alone, "length")
    assert group.num_preemptions() > 0


@pytest.mark.parametrize("mode", FAST_MODES, ids=str)
def test_sch_02_and_03_preempted_requests_lose_and_repeat_nothing(
    mode: Mode, crowd: Crowd, tiny_groups: TinyGroups
) -> None:
    group = tiny_groups[mode]
    check_crowd(group, crowd)
    check_streams(group, crowd)
    check_no_block_is_lost(group)


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [True, False])
def test_sch_03_async_scheduling_preempts_little_more(chunked: bool, crowd: Crowd, tiny_llama: TinyCase) -> None:
    counts = []
    for depth in (1, 2, 3):
        with RunningGroup(tiny_llama.folder, **Mode(depth, 1, chunked, 1).options) as group:
            group.generate(crowd.prompts, greedy(_NUM_TOKENS))
            counts.append(group.num_preemptions())
    plain, *ahead = counts
    assert plain > 0
    assert max(ahead) <= 2 * plain


# --- prefixes


def check_logprobs(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """The chosen tokens' log probabilities are within 1e-3 of those of `expected`."""
    for output, reference in zip(outputs, expected, strict=True):
        (found,), (right,) = output.outputs, reference.outputs
        assert found.logprobs is not None
        assert right.logprobs is not None
        values = [at[token].logprob for at, token in zip(found.logprobs, found.token_ids, strict=True)]
        expected_values = [at[token].logprob for at, token in zip(right.logprobs, right.token_ids, strict=True)]
        assert values == pytest.approx(expected_values, abs=1e-3)


def check_cached_prompts(group: RunningGroup, prompts: list[list[int]]) -> None:
    """SCH-05: a prompt that is cached but for its last token, three times in a row and three times at once."""
    params, salt = greedy(16, logprobs=0), group.new_salt()
    in_a_row = [group.generate(prompts, params, cache_salt=salt) for _ in range(3)]
    at_once = group.generate(prompts * 3, params, cache_salt=group.new_salt())
    count = len(prompts)
    for outputs in (*in_a_row[1:], at_once[:count], at_once[count : 2 * count], at_once[2 * count :]):
        assert tokens_of(outputs) == tokens_of(in_a_row[0])
        check_logprobs(outputs, in_a_row[0])
    for outputs in in_a_row[1:]:
        cached = [output.num_cached_tokens for output in outputs]
        assert cached == [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]


def check_shared_prompts(group: RunningGroup, prompt: list[int], suffix: list[int]) -> None:
    """SCH-06: one prompt three times in a call, and once with more behind it; computed once, and rightly."""
    params, longer = greedy(16), prompt + suffix
    alone, longer_alone = run_alone(group, [prompt, longer], 16)
    together = group.generate([prompt] * 3, params, cache_salt=group.new_salt())
    assert tokens_of(together) == [alone] * 3
    shared = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    if group.config.worker.num_workers == 1:
        assert sorted(output.num_cached_tokens or 0 for output in together) == [0, shared, shared]
    assert tokens_of(group.generate([prompt, longer], params, cache_salt=group.new_salt())) == [alone, longer_alone]
    assert tokens_of(group.generate([longer, prompt], params, cache_salt=group.new_salt())) == [longer_alone, alone]


_BORDERS = [length + change for length in (16, 32, 48, 64) for change in (-1, 0, 1)]


@pytest.mark.parametrize("mode", FAST_MODES, ids=str)
def test_sch_05_the_whole_prompt_is_cached(mode: Mode, tiny_groups: TinyGroups) -> None:
    for at in range(0, len(_BORDERS), 3):  # few at a time: the pool has to hold them to be of use as a cache
        check_cached_prompts(tiny_groups[mode], random_prompts(_BORDERS[at : at + 3], seed=at))


@pytest.mark.parametrize("mode", FAST_MODES, ids=str)
def test_sch_06_the_same_prompt_several_times_in_one_batch(mode: Mode, tiny_groups: TinyGroups) -> None:
    prompt, suffix = random_prompts([300, 40], seed=22)
    check_shared_prompts(tiny_groups[mode], prompt, suffix)


# --- the real model


def numbered_prompts(lengths: list[int]) -> list[list[int]]:
    """Prompts of the real vocabulary that share no block."""
    return [[100 * VOCAB_SIZE // (length + 1) % 40000 + at for at in range(length)] for length in lengths]


@pytest.mark.slow
@pytest.mark.model
def test_sch_05_and_06_on_smollm2(smollm2: RunningGroup) -> None:
    check_cached_prompts(smollm2, numbered_prompts(_BORDERS))
    check_shared_prompts(smollm2, *numbered_prompts([300, 40]))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunked", [True, False])
def test_sch_02_and_03_on_smollm2(depth: int, chunked: bool, smollm2: RunningGroup, smollm2_gguf: Path) -> None:
    """Continuations of the alphabet, which is known: a hole or a repeat shows."""
    (start,) = smollm2.generate([P2.text], greedy(1))
    alphabet = start.prompt_token_ids
    prompts = [
        ids + alphabet
        for ids in numbered_prompts([_CROWD[at % len(_CROWD)] - len(alphabet) for at in range(_NUM_REQUESTS)])
    ]
    prompts = [[(ids[0] + at) % 40000, *ids[1:]] for at, ids in enumerate(prompts)]
    crowd = Crowd(prompts, tokens_of(smollm2.generate(prompts, greedy(_NUM_TOKENS))))
    options = {"async_depth": depth, "enable_chunked_prefill": chunked, "num_blocks": NUM_BLOCKS}
    options |= {"max_num_batched_tokens": 64} if chunked else {}
    with RunningGroup(smollm2_gguf, **(SMOLLM2_OPTIONS | options)) as group:
        check_crowd(group, crowd)
        check_streams(group, crowd)
        check_no_block_is_lost(group)
