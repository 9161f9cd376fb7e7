"""Crowds: many clients that stream at once, and many that never read beside a few that do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from procengine.child_process import rss_bytes
from tests.procs.canary import expect_idle
from tests.procs.crowd import Crowd
from tests.procs.harness import Served, key_of, tokens_of
from tests.procs.raw_client import RawClient

MB = 1 << 20


def expect_streams(crowd: Crowd, num_tokens: int) -> None:
    """Each got the tokens of one request, in order, and one end; no two the same request's."""
    keys = set()
    for member in crowd.members:
        token_ids = member.token_ids
        key = key_of(token_ids[0], 3)
        assert token_ids == tokens_of(key, 3, num_tokens)
        assert (member.num_ends, member.rejections) == (1, [])
        keys.add(key)
    assert len(keys) == len(crowd.members)


def stream_all(crowd: Crowd, num_tokens: int, timeout_s: float) -> float:
    """All ask at once and read to the end. Returns the seconds that took."""
    began_s = time.monotonic()
    for member in crowd.members:
        member.submit("r", num_tokens)
    crowd.receive_until(lambda member: bool(member.num_ends), timeout_s)
    return time.monotonic() - began_s


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_clients_stream_at_once(serve: Callable[..., Served], count: int) -> None:
    group = serve("--max-num-seqs", 2048, "--max-num-batched-tokens", 8192)
    with Crowd(group.endpoint, count) as crowd:
        seconds = stream_all(crowd, 64, 120)
        expect_streams(crowd, 64)
        print(f"\n{count} clients: {count * 64 / seconds:.0f} tokens a second, {seconds:.2f} s")
        sizes = {role: rss_bytes(group.pids[role]) // MB for role in ("frontend", "output")}
        print(f"resident memory, MB: {sizes}")
        assert max(sizes.values()) < 120 + count * 0.1
    expect_idle(group, 30)
    with group.client() as client:
        assert client.generate([70, 71]).outputs[0].finish_reason == "length"
    assert group.log == ""


def time_stream(group: Served, count: int, num_tokens: int) -> float:
    """Seconds that so many new clients take for a request each."""
    with Crowd(group.endpoint, count) as crowd:
        seconds = stream_all(crowd, num_tokens, 120)
        expect_streams(crowd, num_tokens)
        return seconds


@contextlib.contextmanager
def deaf_crowd(group: Served, count: int, max_tokens: int) -> Iterator[None]:
    """A process with so many clients that have a request each and read nothing of it."""
    root = os.fspath(__file__).rpartition("/tests/")[0]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.procs.crowd", group.endpoint, str(count), str(max_tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


@pytest.mark.parametrize(
    ("num_deaf", "num_readers", "num_tokens", "num_rounds", "step_ms"),
    [(50, 5, 100, 6, 3), pytest.param(1000, 10, 200, 8, 10, marks=pytest.mark.slow)],
)
def test_a_few_that_read_keep_their_speed_beside_many_that_never_do(
    serve: Callable[..., Served], num_deaf: int, num_readers: int, num_tokens: int, num_rounds: int, step_ms: int
) -> None:
    group = serve("--max-num-seqs", 1100, "--max-num-batched-tokens", 8192, "--mock-step-ms", step_ms)
    with RawClient(group.endpoint) as raw:
        alone_s = [time_stream(group, num_readers, num_tokens) for _ in range(2)][1]  # the first one warms up
        before = {role: rss_bytes(group.pids[role]) for role in ("frontend", "output")}
        with deaf_crowd(group, num_deaf, 2000):
            ratios, peak = [], dict(before)
            for _ in range(num_rounds):  # first their pipes fill, then the backlog grows
                ratios.append(time_stream(group, num_readers, num_tokens) / alone_s)
                peak = {role: max(size, rss_bytes(group.pids[role])) for role, size in peak.items()}
            assert raw.stats()["num_unfinished"] == num_deaf, "they had ended before: nothing was tested"
        growth = {role: (peak[role] - before[role]) / MB for role in peak}
        print(f"\n{num_deaf} deaf clients beside {num_readers}: time for the same, against without them: ", end="")
        print(", ".join(f"{ratio:.2f}" for ratio in ratios))
        print("growth of resident memory, MB:", {role: round(size, 1) for role, size in growth.items()})
        assert sorted(ratios)[len(ratios) // 2] < 4, ratios
        assert max(growth.values()) < 30 + num_deaf * 0.15
        expect_idle(group, 30)
