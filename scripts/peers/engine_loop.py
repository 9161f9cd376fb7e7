"""What every engine of `scripts/bench peers` does around its work. Runs in the peers' own environments: nothing but the
standard library here.

Owns: the JSON lines on stdin and stdout (procengine/bench/peers/answers.py describes them), and pacing an engine that
is driven step by step. Never does: know an engine.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

PR_SET_PDEATHSIG = 1  # linux/prctl.h
Run = Callable[[dict[str, Any]], list[dict[str, Any]]]


class SteppedEngine(Protocol):
    """An engine that does one step of its batch at a time."""

    def add(self, number: int, prompt: list[int], output_len: int) -> None:
        """Queue a request; exactly `output_len` tokens, greedily."""

    def step(self) -> Iterable[tuple[int, int]]:
        """Do one step: (request, tokens that came), for those that got some."""


def serve(load: Callable[[], tuple[str, str, Run]]) -> None:
    """Load, say so, and run what is asked for until stdin ends.

    `load` returns the version, the precision, and what runs a load and gives the times of its requests.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also one that is stopped must not outlive its parent
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is no answer

    def say(**answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        version, precision, run = load()
        say(kind="ready", version=version, precision=precision)
        for line in sys.stdin:
            say(kind="ran", requests=run(json.loads(line)))
    except Exception as error:
        say(kind="failed", error=f"{type(error).__name__}: {error}")
        raise


def at_once(load: dict[str, Any], generate: Callable[[list[list[int]], int], object]) -> list[dict[str, Any]]:
    """Run a load with an engine's offline call, which tells no more than that it is done."""
    if load["is_streaming"] or load["max_concurrency"] or load["arrivals_s"]:
        raise ValueError("this engine cannot stream")
    begin_s = time.perf_counter()
    generate(load["prompts"], load["output_len"])
    end_s = time.perf_counter() - begin_s
    times = {"intended_s": 0.0, "submitted_s": 0.0, "token_times_s": [end_s], "token_counts": [load["output_len"]]}
    return [times] * len(load["prompts"])


def by_steps(load: dict[str, Any], engine: SteppedEngine) -> list[dict[str, Any]]:
    """Run a load step by step: a request joins between two steps, when it has arrived and there is room."""
    pace = _Pace(load)
    requests: list[dict[str, Any]] = []
    while pace.has_more:
        while (intended_s := pace.next_arrival()) is not None:
            now_s = pace.now_s()
            engine.add(len(requests), load["prompts"][len(requests)], load["output_len"])
            intended_s = now_s if load["arrivals_s"] is None else intended_s
            requests.append({"intended_s": intended_s, "submitted_s": now_s, "token_times_s": [], "token_counts": []})
        if not pace.num_under_way:
            pace.sleep_until_arrival()
            continue
        came = list(engine.step())
        now_s = pace.now_s()
        for number, count in came:
            requests[number]["token_times_s"].append(now_s)
            requests[number]["token_counts"].append(count)
            if sum(requests[number]["token_counts"]) >= load["output_len"]:
                pace.num_under_way -= 1
    return requests


class _Pace:
    """Which request may be sent."""

    def __init__(self, load: dict[str, Any]) -> None:
        self._num_requests = len(load["prompts"])
        self._arrivals_s = load["arrivals_s"] or [0.0] * self._num_requests
        self._max_under_way = load["max_concurrency"] or self._num_requests
        self._num_sent = 0
        self.num_under_way = 0
        self._begin_s = time.perf_counter()

    @property
    def has_more(self) -> bool:
        return self._num_sent < self._num_requests or self.num_under_way > 0

    def now_s(self) -> float:
        return time.perf_counter() - self._begin_s

    def next_arrival(self) -> float | None:
        """When the next request was due, if it may be sent now; it counts as sent then."""
        if self._num_sent == self._num_requests or self.num_under_way == self._max_under_way:
            return None
        due_s = self._arrivals_s[self._num_sent]
        if due_s > self.now_s():
            return None
        self._num_sent += 1
        self.num_under_way += 1
        return due_s

    def sleep_until_arrival(self) -> None:
        time.sleep(max(self._arrivals_s[self._num_sent] - self.now_s(), 0.0))
