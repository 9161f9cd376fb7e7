"""A worker with a model dies under requests of every kind: what they give is what they give undisturbed."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from procengine import RequestOutput, SamplingParams
from procengine.groups import find_group
from procengine.structured.spec import StructuredOutputs
from tests.e2e.modes import Mode
from tests.e2e.running_group import RunningGroup
from tests.e2e.smollm2 import P2, SMOLLM2_OPTIONS
from tests.e2e.tiny_prompts import TinyCase, random_prompts

_NUM_TOKENS = 150
_WAIT_S = 60.0
_KINDS = [
    SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=2),
    SamplingParams(seed=3, max_tokens=_NUM_TOKENS, ignore_eos=True, top_p=0.9, prompt_logprobs=1),
    SamplingParams(seed=4, max_tokens=_NUM_TOKENS, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(seed=5, max_tokens=_NUM_TOKENS, n=3, min_tokens=100, stop=("a", "b"), logit_bias={7: -2.0}),
    SamplingParams(seed=6, max_tokens=_NUM_TOKENS, structured_outputs=StructuredOutputs(regex="[a-f ]{140}")),
    SamplingParams(seed=7, max_tokens=_NUM_TOKENS, ignore_eos=True, bad_words=("a", "the"), min_p=0.02),
]


def worker_pid(group: RunningGroup) -> int:
    """Of the first worker, once it is there (again)."""
    deadline_s = time.monotonic() + _WAIT_S
    while not Path(f"/proc/{(pid := find_group(group.endpoint).pids['worker-0'])}").exists():
        assert time.monotonic() < deadline_s, "the worker was not restarted"
        time.sleep(0.02)
    return pid


class Killer:
    """Kills a worker of a group when so many tokens have come, and sees that the requests were in the middle."""

    def __init__(self, group: RunningGroup, num_tokens: int) -> None:
        self._group = group
        self._num_tokens = num_tokens
        self.num_unfinished = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        deadline_s = time.monotonic() + _WAIT_S
        while self._group.client.stats()["output_tokens"] < self._num_tokens and time.monotonic() < deadline_s:
            time.sleep(0.002)
        pid = worker_pid(self._group)
        os.kill(pid, signal.SIGSTOP)  # so that what is unfinished now is so when it dies
        self.num_unfinished = self._group.client.stats()["num_unfinished"]
        os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Killer:
        self._group.client.stats(reset=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def shown(output: RequestOutput) -> list[tuple[object, ...]]:
    """All that a user sees of a request, but for the last digits of log probabilities."""
    choices = [
        (
            choice.text,
            choice.token_ids,
            choice.finish_reason,
            choice.stop_reason,
            [list(entry) for entry in choice.logprobs or ()],
        )
        for choice in output.outputs
    ]
    return [*choices, ([None if at is None else list(at) for at in output.prompt_logprobs or ()],)]


def check_death(group: RunningGroup, prompts: list[list[int]], params: list[SamplingParams], kill_at: int) -> None:
    worker_pid(group)
    undisturbed = group.generate(prompts, params, cache_salt=group.new_salt())
    with Killer(group, kill_at) as killer:
        disturbed = group.generate(prompts, params, cache_salt=group.new_salt())
    assert killer.num_unfinished > 0, "it was over before the worker died"
    for found, expected in zip(disturbed, undisturbed, strict=True):
        assert shown(found) == shown(expected)


@pytest.mark.parametrize("mode", [Mode(2, 1, True, 1), Mode(3, 4, True, 2)], ids=str)
def test_requests_of_every_kind_go_on(mode: Mode, tiny_llama: TinyCase) -> None:
    prompts = random_prompts([20 + 7 * at for at in range(2 * len(_KINDS))], seed=31)
    with RunningGroup(tiny_llama.folder, **mode.options | {"restart_window": 0.1}) as group:
        for kill_at in (5, 300):
            check_death(group, prompts, _KINDS * 2, kill_at)


@pytest.mark.model
def test_smollm2_goes_on_within_seconds(smollm2_gguf: Path) -> None:
    """The alphabet has no hole and no repeat, and the pause is that of a restart."""
    with RunningGroup(smollm2_gguf, **SMOLLM2_OPTIONS) as group:
        prompts = [P2.text, "Once upon a time", "The three largest cities are"]
        params = [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=0)] * 3
        undisturbed = group.generate(prompts, params)
        arrivals: list[float] = []
        others = threading.Thread(target=group.generate, args=(prompts[1:], params[1:]))
        with Killer(group, 30):
            deltas = []
            for delta in group.client.stream(prompts[0], params[0]):
                arrivals.append(time.monotonic())
                deltas.append(delta)
                if len(deltas) == 1:
                    others.start()
        others.join()
        token_ids = [token for delta in deltas for token in delta.token_ids]
        assert token_ids == undisturbed[0].outputs[0].token_ids
        assert "DEFGHIJKLMNOPQRSTUVW" in "".join(delta.text for delta in deltas)
        pause_s = max(after - before for before, after in itertools.pairwise(arrivals))
        print(f"the stream stood still for {pause_s:.2f} s")
