"""A step for which the device has no memory costs its own requests, and nobody else anything."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from procengine import Client, RequestFailedError, SamplingParams
from procengine.groups import find_group
from tests.e2e.out_of_memory import LONGEST
from tests.e2e.running_group import RunningGroup
from tests.e2e.tiny_prompts import MAX_TOKENS, TinyCase

_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 1024,
    "num_blocks": 512,
    "max_num_seqs": 1,
    "logits_processors": ["tests.e2e.out_of_memory:make"],
}


def ask(group: RunningGroup, prompt: list[int]) -> list[int] | str:
    """The answer of a client of its own, or the error it gets."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with Client(group.endpoint) as client:
        try:
            (output,) = client.generate([prompt], params)
        except RequestFailedError as error:
            return str(error)
    return output.outputs[0].token_ids


def test_a_step_without_memory_fails_its_requests_and_not_the_worker(
    tiny_llama: TinyCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # where the worker finds it
    answers = {tuple(p): r.token_ids for p, r in zip(tiny_llama.prompts, tiny_llama.runs, strict=True)}
    short = [p for p in answers if len(p) + MAX_TOKENS < LONGEST][:3]
    long = next(p for p in answers if len(p) > LONGEST)
    with RunningGroup(tiny_llama.folder, **_OPTIONS) as group, ThreadPoolExecutor(4) as pool:
        with group.held_until_queued(4):
            found = list(pool.map(lambda prompt: ask(group, list(prompt)), [short[0], long, *short[1:]]))
        assert [found[0], *found[2:]] == [answers[prompt] for prompt in short]
        assert "out of memory" in str(found[1])
        assert "lower max_num_batched_tokens" in str(found[1])
        # Again: nothing of the step that failed is taken for computed.
        assert "out of memory" in str(ask(group, list(long)))
        assert [ask(group, list(prompt)) for prompt in short] == [answers[prompt] for prompt in short]
        assert find_group(group.endpoint).pids == group.pids, "no process died"
