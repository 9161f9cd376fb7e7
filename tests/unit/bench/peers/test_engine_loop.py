"""The loop that drives the peers: closed loop, open loop, one request after the other."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[4] / "scripts" / "peers" / "engine_loop.py"


@pytest.fixture(scope="module")
def loop() -> Any:
    spec = importlib.util.spec_from_file_location("engine_loop", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Batch:
    """An engine that gives each request it has a token a step, and notes how many it had."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.sizes: list[int] = []

    def add(self, number: int, prompt: list[int], output_len: int) -> None:
        assert number not in self.left
        self.left[number] = output_len

    def step(self) -> list[tuple[int, int]]:
        self.sizes.append(len(self.left))
        came = [(number, 1) for number in self.left]
        self.left = {number: left - 1 for number, left in self.left.items() if left > 1}
        return came


def load(num_requests: int, **changes: Any) -> dict[str, Any]:
    plain = {"output_len": 4, "is_streaming": True, "max_concurrency": None, "arrivals_s": None}
    return {"prompts": [[1]] * num_requests, **plain, **changes}


def test_all_at_once(loop: Any) -> None:
    engine = Batch()
    requests = loop.by_steps(load(5), engine)
    assert engine.sizes == [5] * 4
    assert [one["token_counts"] for one in requests] == [[1] * 4] * 5
    assert all(one["intended_s"] == one["submitted_s"] <= one["token_times_s"][0] for one in requests)
    assert all(one["token_times_s"] == sorted(one["token_times_s"]) for one in requests)


def test_closed_loop_keeps_to_its_limit_and_fills_it(loop: Any) -> None:
    engine = Batch()
    requests = loop.by_steps(load(7, max_concurrency=3), engine)
    assert engine.sizes == [3] * 8 + [1] * 4
    assert len(requests) == 7 and not engine.left


def test_arrivals_are_waited_for_and_latency_counts_from_them(loop: Any) -> None:
    """The second comes long after the first has ended: the engine does nothing meanwhile."""
    engine = Batch()
    requests = loop.by_steps(load(3, arrivals_s=[0.0, 0.05, 0.05]), engine)
    assert sum(engine.sizes) == 12 and 0 not in engine.sizes
    assert [one["intended_s"] for one in requests] == [0.0, 0.05, 0.05]
    assert all(one["submitted_s"] >= one["intended_s"] for one in requests)


def test_offline_call_tells_its_end_alone(loop: Any) -> None:
    asked = []
    requests = loop.at_once(load(3, is_streaming=False), lambda prompts, length: asked.append((prompts, length)))
    assert asked == [([[1]] * 3, 4)]
    assert len(requests) == 3 and requests[0]["token_counts"] == [4]
    with pytest.raises(ValueError, match="cannot stream"):
        loop.at_once(load(3), lambda *_: None)
