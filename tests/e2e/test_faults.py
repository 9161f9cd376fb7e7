"""Processes of a group with the real model suffer faults: what its streams give is what they give undisturbed.

A few cells of the matrix that `tests/procs/test_fault_matrix.py` goes through with the mock device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from procengine import RequestOutput, SamplingParams
from procengine.client import Client
from procengine.groups import find_group
from tests.e2e.smollm2 import P2
from tests.procs.faults.injection import Injector
from tests.procs.harness import Served, wait_until

_WAIT_S = 60.0
_LONG = " ".join(f"On day {day} the ship sailed on, and the crew counted {day * 7} birds." for day in range(1, 50))
_PROMPTS = ["Once upon a time", P2.text, "The three largest cities of France are", "A short poem about the sea:"]
_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=6, max_tokens=60, ignore_eos=True, stop=("the",)),
]
# role, fault, phase; the slow lane has the rest
_CELLS = [
    ("worker", "raise", "decode"),
    ("output", "SIGKILL", "decode"),
    ("worker", "SIGKILL", "prefill"),
]
_SLOW_CELLS = [
    ("worker", "SIGKILL", "idle"),
    ("worker", "SIGKILL", "decode"),
    ("worker", "SIGSTOP", "decode"),
    ("worker", "memory", "decode"),
    ("worker", "exit", "decode"),
    ("worker", "memory", "prefill"),
    ("worker", "slow", "decode"),
    ("output", "raise", "decode"),
    ("output", "memory", "prefill"),
    ("output", "exit", "idle"),
]


@pytest.fixture(scope="module")
def disturbed(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Injector]]:
    """One group for all cells, with everything that the defaults have. A hang is noticed soon."""
    folder = tmp_path_factory.mktemp("faults")
    injector = Injector(folder)
    sizes = ("--max-model-len", 2048, "--num-blocks", 600, "--max-num-batched-tokens", 128, "--max-num-seqs", 16)
    limits = ("--restart-window", 0.1, "--step-timeout", 5)
    env = injector.environment | {"FAULTS_DEVICE": "model"}
    name = f"faults-{os.getpid()}"
    with Served(smollm2_gguf, folder, "--device", "cpu", *sizes, *limits, name=name, env=env) as group:
        yield group.wait_ready(), injector


def shown(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    return [
        (choice.text, choice.token_ids, choice.finish_reason, [list(entry) for entry in choice.logprobs or ()])
        for output in outputs
        for choice in output.outputs
    ]


def ask(client: Client, phase: str, salt: str) -> list[tuple[object, ...]]:
    prompts = [f"{_LONG} {prompt}" for prompt in _PROMPTS] if phase == "prefill" else _PROMPTS
    return shown(client.generate(list(prompts), _PARAMS, cache_salt=salt))


@pytest.mark.model
@pytest.mark.parametrize(
    ("role", "fault", "phase"),
    [*_CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in _SLOW_CELLS)],
)
def test_nothing_is_lost(disturbed: tuple[Served, Injector], role: str, fault: str, phase: str) -> None:
    group, injector = disturbed
    before = find_group(group.name).pids
    process = "worker-0" if role == "worker" else role
    with Client(group.endpoint) as client:
        undisturbed = ask(client, phase, f"{role} {fault} undisturbed")
        client.stats(reset=True)
        answers: list[list[tuple[object, ...]]] = []
        asking = threading.Thread(target=lambda: answers.append(ask(client, phase, f"{role} {fault}")))
        if phase != "idle":
            asking.start()
            _wait_phase(client, phase)
        started_s = time.monotonic()
        injector.strike(group, role, before[process], fault, None)
        if phase == "idle":
            asking.start()
        asking.join(_WAIT_S)
        print(f"{role}-{fault}-{phase}: all done after {time.monotonic() - started_s:.2f} s")
        assert answers == [undisturbed]
        assert not injector.is_armed(role, "step")
        if fault != "slow":
            wait_until(lambda: find_group(group.name).pids[process] != before[process], "a successor", _WAIT_S)
        pids = find_group(group.name).pids
        assert {name for name, pid in pids.items() if pid != before[name]} == ({process} if fault != "slow" else set())
        wait_until(lambda: injector.processes() == set(pids.values()), "no orphan", _WAIT_S)


def _wait_phase(client: Client, phase: str) -> None:
    """Prompts are being computed, and no token is there yet; or some tokens of each are."""

    def is_reached() -> bool:
        stats = client.stats()
        return bool(stats["num_steps"] >= 2) if phase == "prefill" else bool(stats["output_tokens"] >= 60)

    wait_until(is_reached, f"{phase} has begun", _WAIT_S)
    if phase == "prefill":
        assert client.stats()["output_tokens"] < 60
