"""Greedy answers in float32 are those of transformers' `generate`, token for token, in every mode of the engine."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from procengine import LLM, RequestOutput
from procengine.tokenizer import Tokenizer
from tests.e2e.conftest import TinyGroups
from tests.e2e.modes import ALL_MODES, FAST_MODES, Mode
from tests.e2e.oracle import GreedyRun, best_tokens, greedy_run
from tests.e2e.running_group import RunningGroup
from tests.e2e.smollm2 import SMOLLM2_OPTIONS, greedy
from tests.e2e.tiny_folders import FAMILIES
from tests.e2e.tiny_prompts import LENGTHS, MAX_TOKENS, TinyCase, fitting_batches, make_tiny_case

_MIN_GAP = 1e-3  # far above what the order of float32 additions moves a logit

Answers = list[tuple[list[int], str | None]]


def answers(outputs: list[RequestOutput]) -> Answers:
    return [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]


def num_cached(outputs: list[RequestOutput]) -> list[int]:
    assert all(output.num_cached_tokens is not None for output in outputs)
    return [output.num_cached_tokens or 0 for output in outputs]


def run(group: RunningGroup, case: TinyCase, indices: list[int], salt: str) -> tuple[Answers, list[int]]:
    """Answers of the prompts at `indices`, in the order of the prompts; and how much of each was cached."""
    outputs = group.generate([case.prompts[i] for i in indices], [case.params[i] for i in indices], cache_salt=salt)
    in_order = [output for _, output in sorted(zip(indices, outputs, strict=True), key=lambda pair: pair[0])]
    assert [output.prompt_token_ids for output in in_order] == [case.prompts[i] for i in sorted(indices)]
    return answers(in_order), num_cached(in_order)


def check_calm(group: RunningGroup, case: TinyCase) -> None:
    """With room for all: each batch with a cold cache, then again with its prompts in the cache."""
    salt = group.new_salt()
    group.num_preemptions()
    for batch in fitting_batches(case.prompts, MAX_TOKENS):
        expected = [case.expected[i] for i in batch]
        cold, cached = run(group, case, batch, salt)
        assert cold == expected
        assert not any(cached)
        warm, cached = run(group, case, batch, salt)
        assert warm == expected
        assert cached == [(len(case.prompts[i]) - 1) // 16 * 16 for i in batch]
    assert group.num_preemptions() == 0


def check_crowded(group: RunningGroup, case: TinyCase) -> None:
    """All at once, in order, in a pool that holds a quarter of them: with a cold cache, then with what that left."""
    everything, salt = list(range(len(case.prompts))), group.new_salt()
    group.num_preemptions()
    with group.held_until_queued(len(everything)):
        cold, _ = run(group, case, everything, salt)
    assert cold == case.expected
    assert group.num_preemptions() > 0
    with group.held_until_queued(len(everything)):
        warm, cached = run(group, case, everything[::-1], salt)  # the last ones first: they are still cached
    assert warm == case.expected
    assert sum(cached) > 0
    assert group.num_preemptions() > 0


def check_oracle(case: TinyCase) -> None:
    """There is one right answer: no second best token comes close. Some prompts end by an end token, others do not."""
    assert sorted(map(len, case.prompts)) == sorted(LENGTHS)
    assert min(chain.from_iterable(run.gaps for run in case.runs)) > _MIN_GAP, "give the model another seed"
    reasons = [reason for _, reason in case.expected]
    assert 3 <= reasons.count("stop") <= 13


def test_the_oracle_is_sure_of_every_token(tiny_llama: TinyCase) -> None:
    check_oracle(tiny_llama)


@pytest.mark.parametrize("mode", FAST_MODES, ids=str)
def test_prompts_that_fit_the_pool(mode: Mode, tiny_groups: TinyGroups, tiny_llama: TinyCase) -> None:
    check_calm(tiny_groups[mode], tiny_llama)


@pytest.mark.parametrize("mode", FAST_MODES, ids=str)
def test_prompts_that_preempt_each_other(mode: Mode, tiny_groups: TinyGroups, tiny_llama: TinyCase) -> None:
    check_crowded(tiny_groups[mode], tiny_llama)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_every_family(family: str, tmp_path: Path) -> None:
    case = make_tiny_case(family, tmp_path)
    check_oracle(case)
    with LLM(str(case.folder), **Mode(2, 4, True, 1).options) as llm:
        assert answers(llm.generate(case.prompts, case.params, use_tqdm=False)) == case.expected
        assert llm.stats(reset=True)["num_preemptions"] > 0
        longest = max(range(len(LENGTHS)), key=lambda index: len(case.prompts[index]))
        (alone,) = llm.generate([case.prompts[longest]], case.params[longest], use_tqdm=False)
        assert answers([alone]) == [case.expected[longest]]
        assert llm.stats()["num_preemptions"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in ALL_MODES if mode not in FAST_MODES], ids=str)
def test_all_other_modes(mode: Mode, tiny_llama: TinyCase) -> None:
    with RunningGroup(tiny_llama.folder, max_overtaken_tokens=0, **mode.options) as group:
        check_calm(group, tiny_llama)
        check_crowded(group, tiny_llama)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
def test_without_a_prefix_cache(depth: int, tiny_llama: TinyCase) -> None:
    mode = Mode(depth, 4, True, 1)
    with RunningGroup(tiny_llama.folder, **mode.options, enable_prefix_caching=False) as group:
        for _ in range(2):
            found, cached = run(group, tiny_llama, list(range(len(LENGTHS))), "")
            assert found == tiny_llama.expected
            assert not any(cached)
            assert group.num_preemptions() > 0


# The real model. Its prompts are cut from a text, and where its two best tokens come close either of them will do.

_SMOLLM2_TOKENS = 12
_SMOLLM2_MODES: dict[str, dict[str, Any]] = {
    "depth1-whole-crowded": {"async_depth": 1, "enable_chunked_prefill": False, "num_blocks": 48},
    "depth3-steps4-chunked-crowded": {
        "async_depth": 3,
        "decode_steps": 4,
        "max_num_batched_tokens": 256,
        "num_blocks": 48,
    },
    "steps4-workers2": {"decode_steps": 4, "workers": 2},
}


@pytest.fixture(scope="module")
def text_prompts(smollm2: RunningGroup) -> list[list[int]]:
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    token_ids = Tokenizer.load(smollm2.config.model.tokenizer_path).encode(text)
    source = random.Random(4)
    starts = [source.randrange(len(token_ids) - length) for length in LENGTHS]
    return [token_ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


class Judge:
    """The oracle's best tokens; what was asked before is known."""

    def __init__(self, oracle: Any) -> None:
        self._oracle = oracle
        self._known: dict[tuple[int, ...], GreedyRun] = {}

    def best_tokens(self, prompt: list[int], token_ids: list[int]) -> GreedyRun:
        key = (len(prompt), *prompt, *token_ids)
        if key not in self._known:
            self._known[key] = best_tokens(self._oracle, prompt, token_ids)
        return self._known[key]


@pytest.fixture(scope="module")
def judge(smollm2_oracle: Any) -> Judge:
    return Judge(smollm2_oracle)


def check_smollm2(group: RunningGroup, judge: Judge, prompts: list[list[int]]) -> None:
    """Every token is the oracle's best one after the tokens before it."""
    params = greedy(_SMOLLM2_TOKENS, ignore_eos=True)
    found = [output.outputs[0].token_ids for output in group.generate(prompts, params, cache_salt="greedy")]
    num_close = 0
    for prompt, token_ids in zip(prompts, found, strict=True):
        assert len(token_ids) == _SMOLLM2_TOKENS
        best = judge.best_tokens(prompt, token_ids)
        is_close = [gap < _MIN_GAP for gap in best.gaps]
        num_close += sum(is_close)
        is_right = [a == b or close for a, b, close in zip(token_ids, best.token_ids, is_close, strict=True)]
        assert all(is_right), (len(prompt), token_ids, best)
    assert num_close <= 2  # of 384


@pytest.mark.model
def test_smollm2_as_the_defaults_have_it(smollm2: RunningGroup, judge: Judge, text_prompts: list[list[int]]) -> None:
    check_smollm2(smollm2, judge, text_prompts)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(300)
def test_smollm2_against_generate(smollm2: RunningGroup, smollm2_oracle: Any, text_prompts: list[list[int]]) -> None:
    outputs = smollm2.generate(text_prompts, greedy(_SMOLLM2_TOKENS, ignore_eos=True))
    for prompt, output in zip(text_prompts, outputs, strict=True):
        run = greedy_run(smollm2_oracle, prompt, _SMOLLM2_TOKENS)
        # As far as the answer is beyond doubt: behind a near tie the two may go different ways.
        num_sure = next((at for at, gap in enumerate(run.gaps) if gap < _MIN_GAP), _SMOLLM2_TOKENS)
        assert output.outputs[0].token_ids[:num_sure] == run.token_ids[:num_sure]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", _SMOLLM2_MODES)
def test_smollm2_in_other_modes(mode: str, smollm2_gguf: Path, judge: Judge, text_prompts: list[list[int]]) -> None:
    with RunningGroup(smollm2_gguf, **(SMOLLM2_OPTIONS | _SMOLLM2_MODES[mode])) as group:
        for _ in range(2):  # with a cold cache, then with a warm one
            check_smollm2(group, judge, text_prompts)
            assert (group.num_preemptions() > 0) == ("crowded" in mode)
