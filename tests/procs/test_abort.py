"""Ends that a client asks for, or that its leaving means: one terminal message, and everything is free at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from procengine import AsyncClient, SamplingParams, StreamDelta
from procengine.errors import InvalidRequestError, ProcengineError
from procengine.messages import Delta
from tests.procs.canary import Canary, expect_idle
from tests.procs.harness import Served, as_ids, finish, key_of, tokens_of, wait_until
from tests.procs.raw_client import RawClient, body

POOL_TOKENS = 512
LONG = SamplingParams(temperature=0, max_tokens=400)  # 0.8 s and more: it ends by being ended


pytestmark = pytest.mark.usefixtures("canary_after")


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    """Two requests at a time, 16 prompt tokens a step, 2 ms a step: every state of a request lasts long enough."""
    return serve_module(
        *("--num-blocks", POOL_TOKENS // 16, "--max-model-len", POOL_TOKENS, "--max-num-seqs", 2),
        *("--max-num-batched-tokens", 16, "--mock-step-ms", 2),
    )


@pytest.fixture(scope="module")
def remembered(group: Served) -> Canary:
    return Canary.of(group, POOL_TOKENS - 1)


def expect_abort(raw: RawClient, request_id: str) -> int:
    """One terminal message, "abort", behind right tokens. Returns how many."""
    end = raw.wait_end(request_id, 2.0)
    assert isinstance(end, Delta) and end.finish_reason == "abort", end
    token_ids = raw.token_ids(request_id)
    num_prompt_tokens = len(raw.deltas(request_id)[0].prompt_token_ids or ())
    if token_ids:
        assert token_ids == tokens_of(key_of(token_ids[0], num_prompt_tokens), num_prompt_tokens, len(token_ids))
    return len(token_ids)


def test_deltas_come_as_the_tokens_are_computed(raw: RawClient) -> None:
    raw.submit("paced", body(as_ids(3), max_tokens=100))
    raw.wait_for(lambda m: isinstance(m, Delta) and bool(m.token_ids))
    assert not raw.num_ends("paced"), "the first text came with the last"
    raw.wait_end("paced")
    assert len(raw.deltas("paced")) > 5


def test_abort_while_decoding(raw: RawClient) -> None:
    raw.submit("running", body(as_ids(3), max_tokens=400))
    raw.wait_for(lambda m: isinstance(m, Delta) and bool(m.token_ids))
    raw.abort("running")
    assert 0 < expect_abort(raw, "running") < 400
    expect_idle_and_no_more_steps(raw)
    assert raw.num_ends("running") == 1


def test_abort_during_prefill(group: Served, raw: RawClient) -> None:
    """400 tokens in chunks of 16 are 25 steps; the worker stands still in the first two. Nobody has to wait for it."""
    num_steps = raw.stats()["num_steps"]
    with group.paused("worker-0"):
        raw.submit("long prompt", body(as_ids(400), max_tokens=1))
        wait_until(lambda: raw.stats()["num_steps"] == num_steps + 2, "its first chunks are at the worker")
        raw.abort("long prompt")
        assert expect_abort(raw, "long prompt") == 0
    expect_idle_and_no_more_steps(raw)


def expect_idle_and_no_more_steps(raw: RawClient) -> None:
    """The abort is answered when the blocks are free; not even one more step is planned."""
    num_steps = raw.stats()["num_steps"]
    raw.submit("next", body(as_ids(3, 9), max_tokens=1))
    raw.wait_end("next")
    assert raw.stats()["num_steps"] == num_steps + 1


def test_abort_while_queued(raw: RawClient) -> None:
    for name in ("first", "second", "third", "fourth"):  # two run, two wait
        raw.submit(name, body(as_ids(3), max_tokens=400))
    raw.wait_for(lambda m: isinstance(m, Delta) and m.request_id == "second")
    raw.abort("third")
    assert expect_abort(raw, "third") == 0
    assert not raw.deltas("fourth")
    raw.abort("first")
    raw.wait_for(lambda m: isinstance(m, Delta) and m.request_id == "fourth")
    for name in ("second", "fourth"):
        raw.abort(name)
        expect_abort(raw, name)
    assert [raw.num_ends(name) for name in ("first", "second", "third", "fourth")] == [1] * 4


def test_abort_while_its_text_is_being_tokenized(raw: RawClient) -> None:
    """The tokenizer works on one batch at a time: what comes while it is busy waits for it."""
    raw.submit("busy", body("a" * 500_000))
    raw.submit("waiting", body("hello", max_tokens=400))
    raw.submit("waiting too", body("hello", max_tokens=2))
    raw.abort("waiting")
    raw.abort("waiting")
    assert expect_abort(raw, "waiting") == 0
    raw.wait_ends("busy", "waiting too")
    assert raw.num_ends("waiting") == 1


def test_abort_in_the_same_breath_as_the_request(raw: RawClient) -> None:
    for number in range(50):
        raw.submit(f"ids {number}", body(as_ids(3), max_tokens=400))
        raw.abort(f"ids {number}")
        raw.submit(f"text {number}", body("abc", max_tokens=400))
        raw.abort(f"text {number}")
    names = [f"{kind} {number}" for kind in ("ids", "text") for number in range(50)]
    raw.wait_ends(*names)
    for name in names:
        expect_abort(raw, name)
        assert raw.num_ends(name) == 1


def test_abort_twice_late_and_of_nobody_is_harmless(raw: RawClient, group: Served) -> None:
    raw.submit("done", body(as_ids(3), max_tokens=1))
    raw.wait_end("done")
    raw.submit("running", body(as_ids(3), max_tokens=400))
    raw.wait_for(lambda m: isinstance(m, Delta) and m.request_id == "running")
    with RawClient(group.endpoint) as other:
        other.abort("running")  # not its request
        other.stats()
    for name in ("done", "never was", "", "running", "running"):
        raw.abort(name)
    assert expect_abort(raw, "running") > 0
    raw.submit("running", body(as_ids(3), max_tokens=2))  # the name is free again
    wait_until(lambda: raw.num_ends("running") == 2, "the second of that name ends")
    assert raw.num_ends("done") == 1 and len(raw.messages) == len([m for m in raw.messages if m is not None])


def test_abort_races_with_the_end_and_there_is_still_one_end(raw: RawClient) -> None:
    """The abort arrives at every moment of a short request's life."""
    reasons = set()
    for number in range(60):
        raw.submit(f"race {number}", body(as_ids(3), max_tokens=3))
        raw.receive_for(number % 12 * 1e-3)
        raw.abort(f"race {number}")
        end = raw.wait_end(f"race {number}")
        assert isinstance(end, Delta)
        reasons.add(end.finish_reason)
    raw.stats()
    assert all(raw.num_ends(f"race {number}") == 1 for number in range(60))
    assert reasons == {"abort", "length"}, "one side of the race always won: nothing was tested"


# --- through the clients


def test_the_client_aborts_from_another_thread(group: Served) -> None:
    with group.client() as client:
        started = threading.Event()
        deltas: list[StreamDelta] = []

        def read() -> None:
            for delta in client.stream(as_ids(3), LONG, request_id="mine"):
                deltas.append(delta)
                started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(5)
        client.abort("mine")
        client.abort("mine")
        client.abort("nobody's")
        reader.join(5)
        assert not reader.is_alive()
        assert deltas[-1].finish_reason == "abort"


def test_closing_a_stream_aborts_its_request(group: Served) -> None:
    with group.client() as client:
        stream = client.stream(as_ids(3), LONG)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        expect_idle(group, 1.0)


def test_closing_the_client_aborts_what_it_has_running(group: Served) -> None:
    client = group.client()
    stream = client.stream(as_ids(3), LONG)
    next(stream)
    client.close()
    expect_idle(group, 1.0)
    with pytest.raises(ProcengineError, match="closed"):
        list(stream)


def test_cancelling_a_task_aborts_its_request(group: Served) -> None:
    async def call() -> None:
        async with AsyncClient(group.endpoint) as client:

            async def read() -> None:
                async for _ in client.stream(as_ids(3), LONG):
                    started.set()

            started = asyncio.Event()
            calls: list[Coroutine[Any, Any, object]] = [
                *(read(), client.generate(as_ids(4), LONG)),
                *(client.generate("queued", LONG), client.embed("x")),
            ]
            tasks = [asyncio.create_task(call) for call in calls]
            await asyncio.wait_for(started.wait(), 5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(expect_idle, group, 1.0)
            result = await client.generate(as_ids(5), SamplingParams(temperature=0, max_tokens=5))
            token_ids = result.outputs[0].token_ids
            assert token_ids == tokens_of(key_of(token_ids[0], 5), 5, 5)

    asyncio.run(call())


def test_the_id_of_an_abandoned_request_is_not_mixed_up_with_its_next_use(group: Served) -> None:
    """The first one's end is still under way when the second one takes its id: it may be refused, but not ended."""

    async def use_again(client: AsyncClient) -> bool:
        params = SamplingParams(temperature=0, max_tokens=9)
        try:
            result = await client.generate(as_ids(6), params, request_id="mine")
        except InvalidRequestError:
            return False
        token_ids = result.outputs[0].token_ids
        assert result.outputs[0].finish_reason == "length"
        assert token_ids == tokens_of(key_of(token_ids[0], 6), 6, 9)
        return True

    async def call() -> None:
        async with AsyncClient(group.endpoint) as client:
            for _ in range(5):
                stream = client.stream(as_ids(3), LONG, request_id="mine")
                await anext(stream)
                await stream.aclose()  # type: ignore[attr-defined]
                async with asyncio.timeout(2):
                    while not await use_again(client):
                        await client.stats()  # time passes

    asyncio.run(call())


# --- clients that just go


def test_a_client_that_disconnects_aborts_its_requests(group: Served) -> None:
    """Running, prefilling and queued ones; and nobody else's."""
    with RawClient(group.endpoint) as stays:
        leaves = RawClient(group.endpoint)
        for number in range(5):
            leaves.submit(f"r{number}", body(as_ids(3), max_tokens=400))
        leaves.submit("text", body("abc", max_tokens=400))
        leaves.wait_for(lambda m: isinstance(m, Delta))
        stays.submit("mine", body(as_ids(3, 5), max_tokens=20))
        leaves.close()
        stays.wait_end("mine", 1.0)
        assert len(stays.token_ids("mine")) == 20
        expect_idle(group, 1.0)


def test_a_client_that_never_attached_to_the_output_process_costs_nothing(group: Served) -> None:
    with RawClient(group.endpoint, is_attached=False) as raw:
        raw.submit("deaf", body(as_ids(3), max_tokens=400))
        raw.submit("deaf too", {"prompt": "abc"}, "embed")
        wait_until(lambda: raw.stats()["num_steps"] > 0, "it ran")
        expect_idle(group, 1.0)
        raw.attach()
        raw.submit("hears", body(as_ids(3), max_tokens=4))
        raw.wait_end("hears")


_STREAMING_CLIENT = """
import sys
from procengine import Client, SamplingParams
with Client(sys.argv[1]) as client:
    for delta in client.stream([70, 71], SamplingParams(temperature=0, max_tokens=400)):
        print(len(delta.token_ids), flush=True)
"""


def test_a_client_that_is_killed_aborts_its_requests(group: Served) -> None:
    process = subprocess.Popen([sys.executable, "-c", _STREAMING_CLIENT, group.endpoint], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        expect_idle(group, 1.0)
    finally:
        process.kill()
        finish(process)
        process.stdout.close()  # type: ignore[union-attr]


def test_many_clients_that_come_and_go_leave_nothing(group: Served) -> None:
    for number in range(40):
        with RawClient(group.endpoint) as raw:
            raw.submit("short", body(as_ids(2), max_tokens=400 if number % 2 else 1))
            if number % 3 == 0:
                raw.receive(0.05)
    expect_idle(group, 1.0)
