"""Thousands of messages at once, and processes that stand still meanwhile: nothing is lost, nothing is reordered."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest

from procengine.child_process import rss_bytes
from tests.procs.canary import expect_idle
from tests.procs.harness import Served, as_ids, cpu_seconds, finish, key_of, tokens_of
from tests.procs.raw_client import RawClient, body

NUM_REQUESTS = 3000
NUM_TOKENS = 4
STALL_S = 3.0
MB = 1 << 20

# Keeps what came for each request; says "sent" when all are on their way, and at the end what it has.
_CLIENT = """
import json, sys
sys.path.insert(0, sys.argv[3])
from tests.procs.raw_client import RawClient, body
count, tokens = int(sys.argv[2]), int(sys.argv[4])
with RawClient(sys.argv[1]) as client:
    names = [f"r{n}" for n in range(count)]
    for n, name in enumerate(names):
        client.submit(name, body([64 + n % 4000], max_tokens=tokens))
    print("sent", flush=True)
    client.wait_ends(*names, timeout_s=60)
    client.receive(0.05)
    streams, ends = {name: [] for name in names}, dict.fromkeys(names, 0)
    for message in client.messages[2:]:
        streams[message.request_id] += message.token_ids
        ends[message.request_id] += message.finish_reason is not None
    print(json.dumps({"streams": [streams[n] for n in names], "ends": [ends[n] for n in names]}), flush=True)
"""


@pytest.fixture
def burst(serve: Callable[..., Served]) -> Iterator[tuple[Served, subprocess.Popen[bytes]]]:
    group = serve("--max-num-seqs", 256)
    root = os.fspath(__file__).rpartition("/tests/")[0]
    process = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, group.endpoint, str(NUM_REQUESTS), root, str(NUM_TOKENS)],
        stdout=subprocess.PIPE,
    )
    yield group, process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_ipc_06_three_thousand_requests_while_output_and_client_stand_still(
    burst: tuple[Served, subprocess.Popen[bytes]],
) -> None:
    group, process = burst
    assert process.stdout is not None
    assert process.stdout.readline() == b"sent\n"
    stopped = [group.pids["output"], process.pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    resume_s, num_computed = time.monotonic() + STALL_S, 0
    with RawClient(group.endpoint, is_attached=False) as other:  # the rest of the group goes on without them
        while time.monotonic() < resume_s:
            num_computed = other.stats()["output_tokens"]
            time.sleep(0.1)
    assert num_computed > 0
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    answer = read_json(process.stdout)
    assert finish(process) == 0
    assert answer["ends"] == [1] * NUM_REQUESTS
    assert answer["streams"] == [tokens_of(key, 1, NUM_TOKENS) for key in range(NUM_REQUESTS)]
    expect_idle(group)
    assert group.log == ""


def read_json(stream: IO[bytes], timeout_s: float = 60.0) -> Any:
    readable, _, _ = select.select([stream], [], [], timeout_s)
    assert readable, "the client says nothing"
    return json.loads(stream.readline())


def test_the_client_library_takes_a_burst(serve: Callable[..., Served]) -> None:
    """And the group is small and quiet before and after it."""
    group = serve("--max-num-seqs", 256)
    with group.client() as client:
        client.generate([70])
        before = {role: rss_bytes(pid) for role, pid in group.pids.items()}
        assert before["frontend"] < 120 * MB and before["output"] < 120 * MB, before
        results = client.generate([as_ids(1 + n % 30, n) for n in range(1000)])
        assert [r.outputs[0].token_ids for r in results] == [tokens_of(1 + n, 1 + n % 30, 16) for n in range(1000)]
        expect_idle(group)
        after = {role: rss_bytes(pid) for role, pid in group.pids.items()}
        assert after["frontend"] < 120 * MB and after["output"] < 120 * MB, after
    expect_quiet(group, 2.0)


def test_a_client_that_reads_nothing_does_not_hold_up_another(serve: Callable[..., Served]) -> None:
    group = serve("--max-num-seqs", 32)
    with RawClient(group.endpoint) as mute, group.client() as client:
        for number in range(64):
            mute.submit(f"r{number}", body([70 + number], max_tokens=400))
        result = client.generate(as_ids(4))
        assert len(result.outputs[0].token_ids) == 16
        mute.wait_ends(*(f"r{number}" for number in range(64)))
        for number in range(64):
            token_ids = mute.token_ids(f"r{number}")
            assert token_ids == tokens_of(key_of(token_ids[0], 1), 1, 400)


def expect_quiet(group: Served, duration_s: float, share: float = 0.01) -> None:
    """All processes of the group together use less than this share of one core."""
    before = sum(map(cpu_seconds, group.pids.values()))
    time.sleep(duration_s)
    used = sum(map(cpu_seconds, group.pids.values())) - before
    assert used < share * duration_s, f"an idle group used {used:.3f} s of CPU in {duration_s:g} s"


@pytest.mark.slow
def test_an_idle_group_uses_no_cpu_for_ten_seconds(serve: Callable[..., Served]) -> None:
    group = serve("--workers", 2)
    with group.client() as client, RawClient(group.endpoint):
        client.generate([70])
        expect_quiet(group, 10.0)
