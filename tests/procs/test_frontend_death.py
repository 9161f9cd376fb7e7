"""The frontend dies and is restarted in place: what clients had seen a part of ends with a clear error, all else is
sent again by itself, and the workers stay.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from procengine import LLM, AsyncClient, SamplingParams
from procengine.client import Client
from procengine.errors import EngineDeadError, RequestLostError
from procengine.groups import find_group
from procengine.messages import Hello, Lost, Received, Submit, Welcome, encode
from procengine.numbering import epoch_of
from tests.procs.canary import ask_status, expect_idle
from tests.procs.harness import Served, as_ids, children_of, is_running, key_of, num_open_fds, tokens_of, wait_until
from tests.procs.raw_client import RawClient, body
from tests.procs.test_worker_death import (
    SLOW,
    current_pids,
    expect_exact,
    kill,
    submit_load,
    wait_heard,
    wait_restarted,
    wait_tokens,
)

WAIT_S = 60.0


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def expect_own(token_ids: list[int], num_prompt_tokens: int, count: int) -> None:
    assert token_ids == tokens_of(key_of(token_ids[0], num_prompt_tokens), num_prompt_tokens, count)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--async-depth", "1"), marks=pytest.mark.slow, id="depth 1"),
        pytest.param(("--async-depth", "3", "--decode-steps", "4"), id="depth 3, 4 steps"),
        pytest.param(("--workers", "2"), marks=pytest.mark.slow, id="2 workers"),
    ],
)
def test_streams_are_told_and_the_group_goes_on_with_its_workers(
    serve: Callable[..., Served], options: tuple[str, ...]
) -> None:
    """To bare sockets: one message that ends what ran; nothing follows it, also when ids are used again."""
    group = serve(*SLOW, *options)
    old = dict(group.pids)
    with RawClient(group.endpoint) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names, 10)
        kill(group, "frontend")
        raw.wait_ends(*names, timeout_s=WAIT_S)
        losses = [message for message in raw.messages if isinstance(message, Lost)]
        assert [sorted(loss.request_ids) for loss in losses] == [sorted(names)], "it is said once"
        assert f"frontend (pid {old['frontend']}) was killed by SIGKILL" in losses[0].message
        for name in names:
            expect_own(raw.token_ids(name), len(raw.deltas(name)[0].prompt_token_ids or ()), len(raw.token_ids(name)))
        raw.messages.clear()
        submit_load(raw)  # under the same ids; they wait in the socket until somebody is there
        expect_exact(raw, names)
        assert all(epoch_of(raw.deltas(name)[0].key) == 1 for name in names)
        wait_restarted(group, old["frontend"], "frontend")
    assert not is_running(old["frontend"])
    assert {role: pid for role, pid in current_pids(group).items() if role != "frontend"} == {
        role: pid for role, pid in old.items() if role != "frontend"
    }
    expect_idle(group, WAIT_S)


def test_both_clients_ask_again_for_what_they_have_shown_nothing_of(serve: Callable[..., Served]) -> None:
    """Results that come as a whole, streams that have not begun, vectors: all at once, of more than fits the slots."""
    group = serve(*SLOW, "--max-num-seqs", "4")

    async def call(started: threading.Event) -> list[list[int] | int]:
        async with AsyncClient(group.endpoint) as client:

            async def read(at: int) -> list[int]:
                return [t async for d in client.stream(as_ids(4, at), params(30)) for t in d.token_ids]

            wholes = [asyncio.create_task(client.generate(as_ids(4, at), params(60))) for at in range(8)]
            while (await client.stats())["output_tokens"] < 20:
                pass
            streams = [asyncio.create_task(read(at)) for at in range(4)]  # behind the others
            vectors = [asyncio.create_task(client.embed(as_ids(4, at))) for at in range(4)]
            await client.stats()
            started.set()
            results: list[list[int] | int] = [(await one).outputs[0].token_ids for one in wholes]
            results += [await one for one in streams]
            return results + [len((await one).embedding) for one in vectors]

    with group.client() as client:
        started, answers = threading.Event(), []
        threads = [
            threading.Thread(target=lambda: answers.extend(asyncio.run(call(started)))),
            threading.Thread(target=lambda: answers.extend(o.outputs[0].token_ids for o in ask(client))),
        ]

        def ask(client: Client) -> list:  # type: ignore[type-arg]
            return client.generate([as_ids(4, at) for at in range(6)], params(50))

        for thread in threads:
            thread.start()
        assert started.wait(WAIT_S)
        kill(group, "frontend")
        for thread in threads:
            thread.join(WAIT_S)
        assert len(answers) == 8 + 4 + 4 + 6
        assert answers.count(8) == 4
        lengths = [len(tokens) for tokens in answers if isinstance(tokens, list)]
        assert sorted(lengths) == [30] * 4 + [50] * 6 + [60] * 8
        for tokens in answers:
            if isinstance(tokens, list):
                expect_own(tokens, 4, len(tokens))
    expect_idle(group, WAIT_S)


def test_a_stream_that_has_begun_ends_with_an_error_that_names_the_process(serve: Callable[..., Served]) -> None:
    group = serve(*SLOW)

    async def read() -> list[int]:
        async with AsyncClient(group.endpoint) as client:
            tokens: list[int] = []

            async def take_all() -> None:
                async for delta in client.stream(as_ids(4), params(1500)):
                    tokens.extend(delta.token_ids)
                    begun.set()

            with pytest.raises(RequestLostError, match="frontend"):
                await take_all()
            whole = await client.generate(as_ids(4), params(9))
            expect_own(whole.outputs[0].token_ids, 4, 9)
            return tokens

    begun, answers = threading.Event(), []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(read())))
    thread.start()
    with group.client() as client:
        stream = client.stream(as_ids(5), params(1500))
        tokens = [*next(stream).token_ids]
        assert begun.wait(WAIT_S)
        kill(group, "frontend")
        with pytest.raises(EngineDeadError, match=r"frontend \(pid \d+\) was killed by SIGKILL"):
            tokens.extend(token for delta in stream for token in delta.token_ids)
        expect_own(tokens, 5, len(tokens))
        expect_own(client.generate(as_ids(5), params(9)).outputs[0].token_ids, 5, 9)
    thread.join(WAIT_S)
    expect_own(answers[0], 4, len(answers[0]))
    expect_idle(group, WAIT_S)


def test_who_does_not_want_it_again_gets_the_error_also_for_what_had_not_begun(serve: Callable[..., Served]) -> None:
    group = serve(*SLOW, "--max-num-seqs", "1")
    with Client(group.endpoint, resubmit_lost=False) as client, RawClient(group.endpoint) as first:
        first.submit("first", body(as_ids(3), max_tokens=1500))
        wait_tokens(first, ["first"], 1)
        errors: list[BaseException] = []

        def ask() -> None:
            with pytest.raises(RequestLostError, match="frontend") as caught:
                client.generate(as_ids(4), params(5))
            errors.append(caught.value)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: first.stats()["num_unfinished"] == 2, "it waits")
        kill(group, "frontend")
        thread.join(WAIT_S)
        assert len(errors) == 1
        expect_own(client.generate(as_ids(4), params(5)).outputs[0].token_ids, 4, 5)


def test_what_is_sent_while_there_is_no_frontend_waits_and_runs_once(serve: Callable[..., Served]) -> None:
    """Also of a client that does not want anything twice: it had reached nobody."""
    group = serve(*SLOW)
    pid = group.pids["frontend"]
    with (
        Client(group.endpoint, resubmit_lost=False) as once,
        group.client() as client,
        RawClient(group.endpoint) as raw,
    ):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "it is gone")
        raw.submit("r", body(as_ids(6), max_tokens=7))
        for one in (once, client):
            expect_own(one.generate(as_ids(5), params(9)).outputs[0].token_ids, 5, 9)
            assert one.stats()["output_tokens"] >= 9
        raw.wait_end("r", WAIT_S)
        expect_own(raw.token_ids("r"), 6, 7)
        assert raw.stats()["output_tokens"] == 9 + 9 + 7, "nothing ran twice"


def test_what_nobody_could_tell_of_is_found_out(serve: Callable[..., Served]) -> None:
    """The frontend and the output process die at once, and with them the knowledge of who had asked for what."""
    group = serve(*SLOW, "--max-num-seqs", "4")
    old = dict(group.pids)
    with group.client() as client:
        stream = client.stream(as_ids(5), params(1500))
        next(stream)
        answers: list[list[int]] = []
        thread = threading.Thread(
            target=lambda: answers.extend(
                o.outputs[0].token_ids for o in client.generate([as_ids(4, at) for at in range(8)], params(50))
            )
        )
        thread.start()
        with RawClient(group.endpoint) as raw:
            wait_until(lambda: raw.stats()["num_unfinished"] == 9, "all are there")
        with group.paused("frontend", "output"):
            for role in ("frontend", "output"):
                os.kill(old[role], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="frontend"):
            list(stream)
        thread.join(WAIT_S)
        assert len(answers) == 8
        for tokens in answers:
            expect_own(tokens, 4, 50)
    for role in ("frontend", "output"):
        wait_restarted(group, old[role], role)
    expect_idle(group, WAIT_S)


@pytest.mark.parametrize("other", [pytest.param("worker-0", marks=pytest.mark.slow), "output"])
def test_another_one_may_die_while_it_starts(serve: Callable[..., Served], other: str) -> None:
    group = serve(*SLOW)
    known = set(group.pids.values())
    with group.client() as client:
        answers: list[list[int]] = []
        thread = threading.Thread(
            target=lambda: answers.extend(
                o.outputs[0].token_ids for o in client.generate([as_ids(4, at) for at in range(4)], params(100))
            )
        )
        thread.start()
        wait_until(lambda: client_has_begun(group), "tokens are computed")
        kill(group, "frontend")
        second = wait_until(lambda: [pid for pid in children_of(group.pid) if pid not in known], "a successor")
        os.kill(group.pids[other], signal.SIGKILL)
        if other == "output":
            os.kill(second[0], signal.SIGKILL)  # so do two frontends one after the other
        thread.join(WAIT_S)
        assert len(answers) == 4
        for tokens in answers:
            expect_own(tokens, 4, 100)
    expect_idle(group, WAIT_S)


def client_has_begun(group: Served) -> bool:
    with RawClient(group.endpoint, is_attached=False) as raw:
        return bool(raw.stats()["output_tokens"] >= 20)


@pytest.mark.slow
def test_llm_goes_on(model: Path) -> None:
    with LLM(str(model), device="mock", mock_step_ms=5, name="llm-goes-on") as llm:
        killer = threading.Thread(target=lambda: os.kill(wait_busy("llm-goes-on")["frontend"], signal.SIGKILL))
        killer.start()
        results = llm.generate([as_ids(5, at) for at in range(6)], params(100), use_tqdm=False)
        killer.join(WAIT_S)
        for result in results:
            expect_own(result.outputs[0].token_ids, 5, 100)


def wait_busy(name: str) -> dict[str, int]:
    with Client(name) as client:
        wait_until(lambda: client.stats()["output_tokens"] > 20, "it is at work")
    return find_group(name).pids


def test_the_protocol_lets_others_find_out_too(serve: Callable[..., Served]) -> None:
    """As docs/PROTOCOL.md describes it: `received` for what waited, silence for what was lost, then `welcome`."""
    group = serve(*SLOW)
    with RawClient(group.endpoint) as raw:
        assert (raw.welcome.epoch, raw.welcome.mark) == (0, 0)
        kill(group, "frontend")
        wait_until(lambda: not is_running(group.pids["frontend"]), "it is gone")
        submit = Submit("waits", "generate", msgspec.Raw(encode(body(as_ids(3), max_tokens=3))), epoch=0)
        raw.send(submit)
        raw.send(Hello(1, 77))
        welcome = raw.wait_for(lambda m: isinstance(m, Welcome) and m.mark == 77, WAIT_S)
        assert isinstance(welcome, Welcome) and welcome.epoch == 1
        received = next(m for m in raw.messages if isinstance(m, Received))
        assert received == Received("waits", 1)
        assert raw.messages.index(received) < raw.messages.index(welcome)
        raw.wait_end("waits", WAIT_S)
        expect_own(raw.token_ids("waits"), 3, 3)


@pytest.mark.slow
def test_idle_one_is_restarted_too_and_nothing_leaks(serve: Callable[..., Served]) -> None:
    group = serve("--restart-window", "0.1")
    with group.client() as client:
        client.generate(as_ids(5), params(9))
        # All are connected now; after a restart, some are not yet.
        fds = {role: num_open_fds(group.pids[role]) for role in ("supervisor", "output", "worker-0")}
        for _ in range(4):
            before = current_pids(group)["frontend"]
            kill(group, "frontend")
            wait_restarted(group, before, "frontend")
            expect_own(client.generate(as_ids(5), params(9)).outputs[0].token_ids, 5, 9)
        for role, count in fds.items():
            wait_until(lambda role=role, count=count: num_open_fds(group.pids[role]) <= count, f"{role} leaks")  # type: ignore[misc]
    assert [p.num_restarts for p in ask_status(group).processes if p.role == "frontend"] == [4]


@pytest.mark.slow
def test_a_death_while_draining_is_the_end(serve: Callable[..., Served]) -> None:
    """All that was to be finished is gone with it."""
    group = serve(*SLOW, "--drain-timeout", "60")
    with RawClient(group.endpoint) as raw, group.client() as client:
        stream = client.stream(as_ids(5), params(1500))
        next(stream)
        names = submit_load(raw)
        wait_tokens(raw, names, 5)
        group.signal(signal.SIGTERM)
        wait_until(lambda: ask_status(group).processes[0].state == "draining", "it drains")
        kill(group, "frontend")
        with pytest.raises(EngineDeadError, match="frontend"):
            list(stream)
        wait_heard(raw, lambda: any(getattr(m, "code", "") == "engine_dead" for m in raw.messages), "the reason")
    assert group.finish(30) == 1
