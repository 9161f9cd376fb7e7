"""The newest results of a worker are kept, within bounds."""

from __future__ import annotations

import numpy as np

from procengine.messages import EmbedResult, WorkerReady, encode
from procengine.recent_results import RecentResults, first_logprob_positions
from procengine.step_output import Logprobs, PassTimes, SampledTokens, StepOutput, WorkerIdentity


def test_oldest_come_first_of_all_workers_or_of_one() -> None:
    results = RecentResults()
    for number in range(4):
        results.add(number % 2, b"h%d" % number, b"p")
    assert results.all() == [(b"h0", b"p"), (b"h1", b"p"), (b"h2", b"p"), (b"h3", b"p")]
    assert results.of_worker(1) == [(b"h1", b"p"), (b"h3", b"p")]


def test_no_more_than_so_many() -> None:
    results = RecentResults(max_results=2)
    for number in range(5):
        results.add(0, b"%d" % number, b"p")
    assert [header for header, _ in results.all()] == [b"3", b"4"]


def test_no_more_than_so_many_bytes() -> None:
    results = RecentResults(max_bytes=10)
    for number, size in enumerate((4, 4, 4, 1, 9, 11, 2)):
        results.add(0, b"%d" % number, bytes(size))
        assert sum(len(payload) for _, payload in results.all()) <= 10
    assert [header for header, _ in results.all()] == [b"6"]


def test_first_positions_with_logprobs_are_found_by_key() -> None:
    results = [
        result([5, 7, 8], [3, 9, 2], logprob_rows=[0, 2]),
        (encode(EmbedResult(0, 0, 1, 1, 0, (2, 1, 0))), bytes(12)),
        (encode(WorkerReady(0, 0, 5)), b""),
        result([5, 7], [4, 10], logprob_rows=[0]),
        result([2**40, 7], [1, 11], logprob_rows=[0]),
        result([5], [5], logprob_rows=[]),
    ]
    assert first_logprob_positions(results) == {5: 3, 8: 2, 2**40: 1}


def result(keys: list[int], positions: list[int], logprob_rows: list[int]) -> tuple[bytes, bytes]:
    rows = np.array(logprob_rows, np.int32)
    shown = np.zeros((rows.size, 1), np.int32)
    logprobs = Logprobs(rows, shown, shown.astype(np.float32), shown) if logprob_rows else None
    sampled = SampledTokens(np.zeros(len(keys), np.int32), None, logprobs)
    times = PassTimes(0, 0, 0, 0)
    output = StepOutput(0, 0, True, np.array(keys, np.int64), np.array(positions, np.int32), lambda: sampled, times)
    header, payload = output.to_message(WorkerIdentity(0, 0), sampled)
    return encode(header), payload.tobytes()
