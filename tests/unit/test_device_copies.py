"""Copies to and from a device that is late: every buffer is used again, none before its turn."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from procengine.device_streams import CudaStreams, HostStreams, open_streams
from procengine.fetch_pool import FetchPool
from procengine.send_arena import SendArena
from procengine.staging import StagingRing
from tests.unit.late_streams import LateStreams

CPU = torch.device("cpu")


@pytest.mark.parametrize("eager_copies", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_step_computes_with_its_own_payload(depth: int, eager_copies: bool) -> None:
    streams = LateStreams(eager_copies)
    ring = StagingRing(depth, CPU, streams)
    payloads = [np.arange(7 + 30_000 * (step % 4), dtype=np.int32) + step for step in range(11)]
    seen: list[Tensor] = []

    def keep(staged: Tensor) -> None:
        seen.append(staged.clone())

    for step_id, payload in enumerate(payloads, start=5):
        host, staged = ring.stage(step_id, payload)
        assert np.array_equal(host, payload)
        for _ in range(2):  # forward passes
            streams.compute(partial(keep, staged))
    streams.finish()
    for number, found in enumerate(seen):
        assert np.array_equal(found.numpy(), payloads[number // 2])


def test_sent_arrays_may_change_at_once_and_be_of_any_size() -> None:
    streams = LateStreams(eager_copies=False)
    arena = SendArena(CPU, streams)
    values = np.zeros(30_000, np.int64)
    sent = []
    for number in range(12):
        values[:] = number
        size = 200_000 if number == 6 else 30_000
        sent.append(arena.send(np.resize(values, size)[:: 1 + number % 2]))
    sent.append(arena.send(np.zeros((0, 3), np.float32)))
    streams.finish()
    assert [set(tensor.tolist()) for tensor in sent[:-1]] == [{number} for number in range(12)]
    assert sent[-1].shape == (0, 3)


def test_fetched_arrays_are_those_of_their_step_whenever_they_are_waited_for() -> None:
    streams = LateStreams(eager_copies=False)
    pool = FetchPool(streams)
    waits = []
    for step in range(6):
        tokens, logprobs = torch.full((5,), step, dtype=torch.int32), torch.full((5, 3), step / 2)
        waits.append(pool.fetch([tokens, logprobs]))
        if step % 2:  # results are taken later than the next step is told
            for number in (step - 1, step):
                ids, values = waits[number]()
                assert ids.tolist() == [number] * 5
                assert values.dtype == np.float32
                assert values.tolist() == [[number / 2] * 3] * 5


def test_what_was_fetched_stays_when_its_memory_goes_round() -> None:
    pool = FetchPool(HostStreams())
    first = pool.fetch([torch.tensor([1, 2])])()
    second = pool.fetch([torch.tensor([3, 4])])()
    assert [array.tolist() for array in (*first, *second)] == [[1, 2], [3, 4]]


def test_all_graphs_of_a_gpu_are_warmed_up_and_captured_on_one_stream_and_share_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stand-ins for what torch has for CUDA."""
    current, captured = ["main"], []

    class Stream:
        def wait_stream(self, _other: object) -> None: ...

    class Entered:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            current.append(self._stream)

        def __exit__(self, *_: object) -> None:
            current.pop()

    def graph(_graph: object, *, pool: object, stream: object, capture_error_mode: str) -> Entered:
        captured.append((pool, stream, capture_error_mode))
        return Entered(stream)

    for name, stand_in in {
        "Stream": lambda _device: Stream(),
        "current_stream": lambda _device: Stream(),
        "stream": Entered,
        "graph_pool_handle": object,
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    streams, used = CudaStreams(torch.device("cuda")), []

    def work() -> Tensor:
        used.append(current[-1])
        return torch.zeros(1)

    for _ in range(3):
        streams.capture(work)
    assert len(used) == 6  # each once before
    assert {*used} == {stream for _, stream, _ in captured}
    assert len({*captured}) == 1


def test_a_graph_does_its_work_again_and_leaves_the_result_in_its_place() -> None:
    streams = open_streams(CPU)
    numbers = torch.zeros(3)
    replay, result = streams.capture(lambda: numbers + 1)
    numbers.fill_(4)
    replay()
    assert result.tolist() == [5, 5, 5]
