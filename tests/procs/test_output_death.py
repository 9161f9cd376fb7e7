"""The output process dies and is restarted in place: every stream goes on, with nothing missing and nothing twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from procengine import AsyncClient, SamplingParams
from procengine.client import Client
from procengine.detokenizer import Detokenizer
from procengine.messages import Delta, Embedding
from procengine.tokenizer import Tokenizer
from tests.procs.harness import Served, as_ids, children_of, is_running, key_of, num_open_fds, tokens_of, wait_until
from tests.procs.raw_client import RawClient, body
from tests.procs.test_worker_death import (
    NUM_TOKENS,
    SLOW,
    current_pids,
    expect_exact,
    injected,
    kill,
    refusal,
    submit_load,
    wait_heard,
    wait_restarted,
    wait_tokens,
)


def attach(group: Served) -> RawClient:
    return RawClient(group.endpoint, drops_repeats=True)


def text_of(model: Path, token_ids: list[int]) -> str:
    return Detokenizer(Tokenizer.load(model / "tokenizer.json")).text(token_ids)


def text_heard(raw: RawClient, name: str) -> str:
    return "".join(delta.text for delta in raw.deltas(name))


def expect_texts(raw: RawClient, names: list[str], model: Path) -> None:
    for name in names:
        assert text_heard(raw, name) == text_of(model, raw.token_ids(name))


@pytest.mark.parametrize(
    "options",
    [("--async-depth", "1"), ("--async-depth", "2"), ("--async-depth", "3", "--decode-steps", "4"), ("--workers", "2")],
    ids=" ".join,
)
def test_streams_go_on_token_by_token(serve: Callable[..., Served], model: Path, options: tuple[str, ...]) -> None:
    group = serve(*SLOW, *options)
    old = dict(group.pids)
    with attach(group) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names, 10)
        kill(group, "output")
        expect_exact(raw, names)
        expect_texts(raw, names, model)
        wait_restarted(group, old["output"], "output")
        again = submit_load(raw, "again")
        expect_exact(raw, again)
        expect_texts(raw, again, model)
        assert all(raw.num_ends(name) == 1 for name in names)
    assert not is_running(old["output"])
    assert {role: pid for role, pid in current_pids(group).items() if role != "output"} == {
        role: pid for role, pid in old.items() if role != "output"
    }
    assert "output is restarted, its requests go on" in group.log


def test_both_clients_stream_on_and_see_what_an_undisturbed_run_shows(
    serve: Callable[..., Served], model: Path
) -> None:
    group = serve(*SLOW)
    params = SamplingParams(temperature=0, max_tokens=150, logprobs=1)

    async def call() -> list[tuple[list[int], str, int]]:
        async with AsyncClient(group.endpoint) as client:
            started = [asyncio.Event() for _ in range(8)]

            async def read(at: int) -> tuple[list[int], str, int]:
                token_ids, text, num_logprobs = [], "", 0
                async for delta in client.stream(as_ids(4, at), params):
                    token_ids += delta.token_ids
                    text += delta.text
                    num_logprobs += len(delta.logprobs or ())
                    assert delta.finish_reason in (None, "length")
                    started[at].set()
                return token_ids, text, num_logprobs

            streams = [asyncio.create_task(read(at)) for at in range(8)]
            whole = asyncio.create_task(client.generate(as_ids(4, 50), params))
            for event in started:
                await event.wait()
            kill(group, "output")
            output = (await whole).outputs[0]
            return [*await asyncio.gather(*streams), (output.token_ids, output.text, len(output.logprobs or ()))]

    with group.client() as client:
        stream = client.stream(as_ids(4, 99), params)
        deltas = [next(stream)]
        results = asyncio.run(call())
        deltas += stream
        token_ids = [token for delta in deltas for token in delta.token_ids]
        shown = [next(iter(at)) for delta in deltas for at in delta.logprobs or ()]
        assert shown == token_ids
        results.append((token_ids, "".join(delta.text for delta in deltas), len(shown)))
    for token_ids, text, num_logprobs in results:
        assert token_ids == tokens_of(key_of(token_ids[0], 4), 4, 150)
        assert (text, num_logprobs) == (text_of(model, token_ids), 150)


def test_choices_logprobs_embeddings_and_output_kinds_survive(serve: Callable[..., Served], model: Path) -> None:
    group = serve(*SLOW, "--max-num-seqs", "12")
    with attach(group) as raw:
        raw.submit("n", body(as_ids(5), max_tokens=NUM_TOKENS, n=4, logprobs=2, seed=1))
        raw.submit("cumulative", body(as_ids(6), max_tokens=NUM_TOKENS, output_kind="cumulative", logprobs=0))
        raw.submit("final", body(as_ids(7), max_tokens=NUM_TOKENS, output_kind="final", logprobs=0))
        names = submit_load(raw, count=6)
        embedded = [f"e{number}" for number in range(40)]
        wait_heard(raw, lambda: len(raw.token_ids("n")) > 40, "tokens of the choices")
        for name in embedded:
            raw.submit(name, {"prompt_token_ids": as_ids(4)}, "embed")
        raw.wait_end(embedded[3])
        kill(group, "output")
        expect_exact(raw, names)
        expect_texts(raw, names, model)
        raw.wait_ends(*embedded, "cumulative", "final")
        wait_heard(raw, lambda: raw.num_ends("n") == 4, "the end of each choice")
        for name in embedded:
            end = raw.wait_end(name)
            assert isinstance(end, Embedding) and end.finish_reason == "stop" and len(end.data)
            assert raw.num_ends(name) == 1
        for deltas in raw.deltas_by_index("n").values():
            expect_logprobs([token for delta in deltas for token in delta.token_ids], deltas, 5)
        for name, num_prompt_tokens in (("cumulative", 6), ("final", 7)):
            deltas = raw.deltas(name)
            counts = [len(delta.token_ids) for delta in deltas]
            assert counts == sorted(set(counts)), "each one holds more than the one before"
            expect_logprobs(deltas[-1].token_ids, deltas[-1:], num_prompt_tokens)
            assert deltas[-1].text == text_of(model, deltas[-1].token_ids)
        assert len(raw.deltas("final")) == 1


def expect_logprobs(token_ids: list[int], deltas: list[Delta], num_prompt_tokens: int) -> None:
    assert token_ids == tokens_of(key_of(token_ids[0], num_prompt_tokens), num_prompt_tokens, NUM_TOKENS)
    assert [entry.token_ids[0] for delta in deltas for entry in delta.logprobs or ()] == token_ids


def test_a_death_in_the_middle_of_a_prompt_loses_no_prompt_logprob(serve: Callable[..., Served]) -> None:
    group = serve("--mock-step-ms", "50", "--max-num-batched-tokens", "64", "--max-num-seqs", "64")
    prompt = as_ids(600)
    with attach(group) as raw:
        raw.submit("r", body(prompt, max_tokens=3, prompt_logprobs=0))
        wait_until(lambda: raw.stats()["num_steps"] >= 3, "some chunks are computed")
        kill(group, "output")
        expect_exact(raw, ["r"], 3)
        logprobs = raw.deltas("r")[0].prompt_logprobs
        assert logprobs is not None and logprobs[0] is None
        assert [entry.token_ids[0] for entry in logprobs[1:] if entry is not None] == prompt[1:]


@pytest.mark.parametrize("matches", [True, False])
def test_text_that_is_held_back_for_a_stop_string_is_not_lost(
    serve: Callable[..., Served], model: Path, matches: bool
) -> None:
    """The stop string is that of 360 tokens: some are on hold when their keeper dies."""
    group = serve("--mock-step-ms", "10")
    expected = tokens_of(0, 5, 400)
    before, stop = text_of(model, expected[:20]), text_of(model, expected[20:380])
    with attach(group) as raw:
        raw.submit("r", body(as_ids(5), max_tokens=400, stop=stop if matches else stop + "\n"))
        wait_tokens(raw, ["r"], 60)
        with group.paused("worker-0"):
            assert len(raw.token_ids("r")) < 370 and text_heard(raw, "r") == before, "it is on hold"
            kill(group, "output")
        end = raw.wait_end("r", 30)
        assert isinstance(end, Delta)
        if matches:
            assert (end.finish_reason, end.stop_reason) == ("stop", stop)
            assert (raw.token_ids("r"), text_heard(raw, "r")) == (expected[:380], before)
        else:
            assert end.finish_reason == "length"
            assert (raw.token_ids("r"), text_heard(raw, "r")) == (expected, text_of(model, expected))
        wait_until(lambda: raw.stats()["num_unfinished"] == 0, "the frontend hears of the end")
        assert raw.num_ends("r") == 1


def test_an_end_whose_text_died_with_its_process_is_told_by_the_next_one(
    serve: Callable[..., Served], model: Path
) -> None:
    """All tokens are computed, and ended requests forgotten by scheduler and worker, when the text's keeper dies."""
    group = serve("--mock-step-ms", "1")
    with attach(group) as raw:
        names = submit_load(raw, count=4, logprobs=0)
        raw.submit("e", {"prompt_token_ids": as_ids(4)}, "embed")
        raw.submit("aborted", body(as_ids(9), max_tokens=1500))
        wait_tokens(raw, names, 2)
        with group.paused("output"):
            raw.abort("aborted")
            wait_until(lambda: raw.stats()["num_unfinished"] == 0, "all is computed")
            kill(group, "output")
        expect_exact(raw, names)
        expect_texts(raw, names, model)
        for name in names:
            assert [at.token_ids[0] for delta in raw.deltas(name) for at in delta.logprobs or ()] == raw.token_ids(name)
        assert isinstance(end := raw.wait_end("e"), Embedding) and len(end.data)
        assert isinstance(end := raw.wait_end("aborted"), Delta) and end.finish_reason == "abort"
        token_ids = raw.token_ids("aborted")
        assert token_ids == tokens_of(key_of(token_ids[0], 9), 9, len(token_ids))


@pytest.mark.parametrize("workers", [1, 2])
def test_it_may_die_together_with_a_worker(serve: Callable[..., Served], model: Path, workers: int) -> None:
    group = serve(*SLOW, "--workers", str(workers))
    with attach(group) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names, 10)
        with group.paused("frontend"):  # it hears of both at once
            kill(group, "worker-0")
            kill(group, "output")
        expect_exact(raw, names)
        expect_texts(raw, names, model)
        kill(group, "output")
        kill(group, "worker-0")
        again = submit_load(raw, "again")
        expect_exact(raw, again)
        expect_texts(raw, again, model)


def test_the_second_one_may_die_while_it_starts(serve: Callable[..., Served], model: Path) -> None:
    group = serve(*SLOW)
    known = set(group.pids.values())
    with attach(group) as raw, Client(group.endpoint) as client:
        stream = client.stream(as_ids(8), SamplingParams(temperature=0, max_tokens=300))
        token_ids = [*next(stream).token_ids]
        names = submit_load(raw)
        wait_tokens(raw, names, 10)
        kill(group, "output")
        second = wait_until(lambda: [pid for pid in children_of(group.pid) if pid not in known], "a successor")
        os.kill(second[0], signal.SIGKILL)
        expect_exact(raw, names)
        expect_texts(raw, names, model)
        for delta in stream:
            token_ids += delta.token_ids
        assert token_ids == tokens_of(key_of(token_ids[0], 8), 8, 300)


def test_a_client_that_comes_while_there_is_none_waits_for_it(serve: Callable[..., Served]) -> None:
    group = serve()
    kill(group, "output")
    with group.client() as client:
        token_ids = client.generate(as_ids(5), SamplingParams(temperature=0, max_tokens=9)).outputs[0].token_ids
        assert token_ids == tokens_of(0, 5, 9)


def test_idle_one_is_restarted_too_and_nothing_leaks(serve: Callable[..., Served]) -> None:
    group = serve("--restart-window", "0.1")
    with attach(group) as raw:
        expect_exact(raw, submit_load(raw, "first"))
        # All are connected now; after a restart, some are not yet.
        fds = {role: num_open_fds(group.pids[role]) for role in ("supervisor", "frontend", "worker-0")}
        for round_ in range(4):
            before = current_pids(group)["output"]
            kill(group, "output")
            if round_ % 2:
                wait_restarted(group, before, "output")
            expect_exact(raw, submit_load(raw, f"round {round_} "))
            wait_restarted(group, before, "output")
        for role, count in fds.items():
            wait_until(lambda role=role, count=count: num_open_fds(group.pids[role]) <= count, f"{role} leaks")  # type: ignore[misc]


def test_a_death_while_draining_loses_nothing(serve: Callable[..., Served], model: Path) -> None:
    """Also not the ends of requests that the frontend is done with: it is not drained before they are told."""
    group = serve("--mock-step-ms", "2", "--drain-timeout", "30")
    with attach(group) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names, 5)
        group.signal(signal.SIGTERM)
        wait_until(lambda: "draining" in refusal(raw) or "shutting down" in refusal(raw), "it is draining")
        with group.paused("output"):
            wait_until(lambda: raw.stats()["num_unfinished"] == 0, "all is computed")
            kill(group, "output")
        expect_exact(raw, names)
        expect_texts(raw, names, model)
    assert group.finish(30) == 0


def test_clients_that_never_come_back_do_not_delay_the_end_of_the_group(serve: Callable[..., Served]) -> None:
    group = serve(*SLOW, "--drain-timeout", "60")
    with attach(group) as stays:
        with attach(group) as gone:
            names = submit_load(gone, count=4)
            wait_tokens(gone, names, 2)
            kill(group, "output")
        (name,) = submit_load(stays, "stays", count=1)
        expect_exact(stays, [name])
        group.signal(signal.SIGTERM)
        assert group.finish(10) == 0


def test_too_many_deaths_are_the_end_and_everybody_hears_why(serve: Callable[..., Served]) -> None:
    group = serve("--mock-step-ms", "50", "--max-restarts", "2")
    with attach(group) as raw:
        names = submit_load(raw)
        for number in range(3):
            before = current_pids(group)["output"]
            kill(group, "output")
            if number < 2:
                wait_restarted(group, before, "output")
        raw.wait_for(lambda m: "output" in getattr(m, "message", ""), 10)
        assert names
    assert group.finish() == 1
    assert "output died 3 times within 60 s (max_restarts is 2)" in group.log


# Run by every Python of the group: the output process dies of the texts of some requests.
KILLER = """
import os, sys
if "procengine.procs.output" in sys.orig_argv:
    from procengine.choice import Choice
    def deadly(name, method):
        def call(self, *arguments):
            found = method(self, *arguments)
            if self.register.request_id == "poison " + name and self.register.prompt_token_ids:
                os._exit(9)
            return found
        return call
    Choice.__init__ = deadly("from the start", Choice.__init__)
    Choice.next_delta = deadly("in its text", Choice.next_delta)
    Choice.end_from_outside = deadly("in its end", Choice.end_from_outside)
"""


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("from the start", marks=pytest.mark.slow),
        "in its text",
        pytest.param("in its end", marks=pytest.mark.slow),
    ],
)
def test_a_request_that_kills_output_processes_ends_and_all_others_live(
    serve: Callable[..., Served], model: Path, tmp_path: Path, where: str
) -> None:
    """Two die of it knowing that it was at work on it; before that, one that notes nothing."""
    group = serve(*SLOW, env=injected(tmp_path, KILLER))
    old = dict(group.pids)
    poison = f"poison {where}"
    with attach(group) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names, 5)
        raw.submit(poison, body(as_ids(5), max_tokens=1000))
        if where == "in its end":
            wait_tokens(raw, [poison], 5)
            raw.abort(poison)
        end = raw.wait_end(poison, 30)
        assert isinstance(end, Delta) and end.finish_reason == "error"
        assert end.error == "the output process died again and again while it was at work on this request"
        expect_exact(raw, names)
        expect_texts(raw, names, model)
        assert raw.num_ends(poison) == 1
        again = submit_load(raw, "again")
        expect_exact(raw, again)
        pids = current_pids(group)
        assert {role for role, pid in pids.items() if pid != old[role]} == {"output"}
    assert group.log.count("output is restarted") == 3
