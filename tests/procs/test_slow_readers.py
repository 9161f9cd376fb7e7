"""Clients that do not read, or went without a word: nobody waits for them, and what waits for them has a bound."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from procengine.detokenizer import Detokenizer
from procengine.messages import Delta
from procengine.tokenizer import Tokenizer
from tests.procs.canary import expect_idle
from tests.procs.crowd import Crowd, Member
from tests.procs.harness import Served, as_ids, key_of, tokens_of, wait_until
from tests.procs.raw_client import RawClient, body
from tests.procs.test_worker_death import kill, wait_restarted

MANY = 1900  # tokens, each a message: more than ZeroMQ and the kernel keep for one client


def num_unfinished(raw: RawClient) -> int:
    return int(raw.stats()["num_unfinished"])


def read_on(member: Member, timeout_s: float = 30.0) -> None:
    """Until its request ends, or it hears that it was dropped."""
    deadline_s = time.monotonic() + timeout_s
    while not (member.num_ends or member.rejections):
        member.receive()
        assert time.monotonic() < deadline_s, member.num_messages
        time.sleep(1e-3)


def test_a_slow_reader_gets_the_same_text_in_fewer_messages(serve: Callable[..., Served], model: Path) -> None:
    group = serve("--max-num-seqs", 4, "--mock-step-ms", 1)
    with Crowd(group.endpoint, 1, is_deaf=True) as crowd, RawClient(group.endpoint) as raw:
        (slow,) = crowd.members
        slow.submit("r", MANY, logprobs=20)  # some hundred bytes a token
        raw.submit("fast", body(as_ids(3), max_tokens=MANY, logprobs=20))
        raw.wait_end("fast", 30)
        assert len(raw.token_ids("fast")) == MANY
        wait_until(lambda: num_unfinished(raw) == 0, "all is computed, whoever reads it", 30)
        assert not slow.num_messages
        read_on(slow)
        assert slow.num_messages < len(raw.deltas("fast")), "none were merged: nothing was tested"
        assert (slow.num_ends, slow.rejections) == (1, [])
        token_ids = slow.token_ids
        assert token_ids == tokens_of(key_of(token_ids[0], 3), 3, MANY)
        assert [at.token_ids[0] for delta in slow.deltas for at in delta.logprobs or ()] == token_ids
        text = "".join(delta.text for delta in slow.deltas)
        assert text == Detokenizer(Tokenizer.load(model / "tokenizer.json")).text(token_ids)
        assert [delta.token_offset for delta in slow.deltas] == [
            sum(len(before.token_ids) for before in slow.deltas[:at]) for at in range(len(slow.deltas))
        ]
    expect_idle(group)


def test_one_that_leaves_too_much_unread_is_dropped_and_hears_why(serve: Callable[..., Served]) -> None:
    group = serve("--max-num-seqs", 4, "--mock-step-ms", 1, "--max-client-bytes", 1024)
    with Crowd(group.endpoint, 1, is_deaf=True) as crowd, RawClient(group.endpoint) as raw:
        (slow,) = crowd.members
        slow.submit("r", 2000)
        raw.wait_for(lambda _: num_unfinished(raw) == 1)
        wait_until(lambda: num_unfinished(raw) == 0, "its request is aborted", 30)
        assert raw.stats()["output_tokens"] < 2000, "it was computed to its end: nothing was tested"
        raw.submit("other", body(as_ids(3), max_tokens=50))
        raw.wait_end("other", 30)
        read_on(slow)
        (farewell,) = slow.rejections
        assert (farewell.request_id, farewell.code) == ("", "overloaded")
        assert "bytes unread" in farewell.message and "1024 for one client (max_client_bytes)" in farewell.message
        token_ids = slow.token_ids
        assert token_ids == tokens_of(key_of(token_ids[0], 3), 3, len(token_ids))
        assert not any(delta.finish_reason for delta in slow.deltas)
        slow.submit("again", 4)  # it reads again, and is as good as any other
        crowd.receive_until(lambda member: bool(member.num_ends), 30)
    expect_idle(group)


def test_all_unread_bytes_together_have_a_limit_and_the_largest_goes(serve: Callable[..., Served]) -> None:
    group = serve("--max-num-seqs", 8, "--mock-step-ms", 1, "--max-unsent-bytes", 2048)
    with Crowd(group.endpoint, 4, is_deaf=True) as crowd, RawClient(group.endpoint) as raw:
        for member in crowd.members:
            member.submit("r", 2000)
        wait_until(lambda: num_unfinished(raw) < 4 and raw.stats()["output_tokens"] > 100, "one is dropped", 30)
    expect_idle(group, 30)


def test_a_client_that_leaves_while_all_its_requests_wait_is_noticed(serve: Callable[..., Served]) -> None:
    group = serve("--max-num-seqs", 1, "--mock-step-ms", 2)
    with RawClient(group.endpoint) as stays:
        stays.submit("running", body(as_ids(3), max_tokens=2000))
        stays.wait_for(lambda m: isinstance(m, Delta))
        leaves = RawClient(group.endpoint)
        stays_waiting = RawClient(group.endpoint)
        for number in range(3):
            leaves.submit(f"r{number}", body(as_ids(3), max_tokens=9))
        stays_waiting.submit("mine", body(as_ids(3), max_tokens=9))
        wait_until(lambda: num_unfinished(stays) == 5, "all are there")
        leaves.close()
        wait_until(lambda: num_unfinished(stays) == 2, "those of the one that left are aborted", 3.5)
        assert not stays.num_ends("running"), "too late: they had their turn"
        stays.abort("running")
        stays_waiting.wait_end("mine")
        assert len(stays_waiting.token_ids("mine")) == 9, "who stays and waits is asked, and not dropped"
        stays_waiting.close()
    expect_idle(group)


def test_a_client_that_asks_and_reads_no_answer_holds_up_nobody(serve: Callable[..., Served]) -> None:
    group = serve()
    with Crowd(group.endpoint, 1, is_deaf=True) as crowd, RawClient(group.endpoint) as raw:
        (deaf,) = crowd.members
        for _ in range(40_000):
            deaf.frontend.send(b"\x91\xa9get_stats")
        for number in range(20):
            raw.submit(f"r{number}", body(as_ids(3)))
            raw.wait_end(f"r{number}", 30)


_STREAMING_CLIENT = """
import sys
from procengine import Client, SamplingParams
with Client(sys.argv[1]) as client:
    try:
        for delta in client.stream([70, 71], SamplingParams(temperature=0, max_tokens=2000)):
            print("token", flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.slow
def test_a_client_that_slept_through_a_restart_of_the_output_process_hears_that_it_lost(
    serve: Callable[..., Served],
) -> None:
    group = serve("--mock-step-ms", 10)  # 20 s for its 2000 tokens: it ends by being ended
    process = subprocess.Popen([sys.executable, "-c", _STREAMING_CLIENT, group.endpoint], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"token\n"
        os.kill(process.pid, signal.SIGSTOP)
        old = group.pids["output"]
        kill(group, "output")
        wait_restarted(group, old, "output")
        expect_idle(group, 18)
        os.kill(process.pid, signal.SIGCONT)
        *_, last = process.stdout.read().splitlines()
        assert last.startswith(b"EngineDeadError the output process was restarted, and this client was not there"), last
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
