"""Several choices of one request, and the three output kinds, through real processes and both clients."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest

from procengine import AsyncClient, Client, InvalidRequestError, SamplingParams, StreamDelta
from tests.procs.canary import expect_idle
from tests.procs.harness import Served, as_ids, key_of, tokens_of
from tests.procs.raw_client import RawClient, body

NUM_TOKENS = 12
PROMPT = list(as_ids(20))


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    return serve_module("--mock-step-ms", 2, "--max-n", 16, "--max-stop-strings", 2, name="choices")


def streamed(client: Client, params: SamplingParams, **options: bool) -> list[list[StreamDelta]]:
    """The deltas of each choice, in order."""
    deltas = list(client.stream(PROMPT, params, **options))  # type: ignore[arg-type]
    return [[delta for delta in deltas if delta.index == index] for index in range(params.n)]


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_every_choice_comes_once_and_whole_whatever_the_kind(group: Served, kind: str) -> None:
    params = SamplingParams(n=5, max_tokens=NUM_TOKENS, logprobs=0, prompt_logprobs=0, output_kind=kind)  # type: ignore[arg-type]
    with group.client() as client:
        whole = client.generate(PROMPT, params)
        assert [output.index for output in whole.outputs] == [0, 1, 2, 3, 4]
        assert {output.finish_reason for output in whole.outputs} == {"length"}
        keys = [key_of(output.token_ids[0], len(PROMPT)) for output in whole.outputs]
        assert keys == list(range(keys[0], keys[0] + 5))
        for key, output in zip(keys, whole.outputs, strict=True):
            assert output.token_ids == tokens_of(key, len(PROMPT), NUM_TOKENS)
            assert output.logprobs is not None and len(output.logprobs) == NUM_TOKENS
        assert whole.prompt_logprobs is not None and len(whole.prompt_logprobs) == len(PROMPT)
        assert whole.prompt_logprobs[0] is None

        for index, deltas in enumerate(streamed(client, params)):
            assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
            assert [delta.prompt_logprobs is not None for delta in deltas] == [
                not (index or at) for at in range(len(deltas))
            ]
            expected = tokens_of(key_of(deltas[0].token_ids[0], len(PROMPT)), len(PROMPT), NUM_TOKENS)
            if kind == "cumulative":
                assert all(delta.token_ids == expected[: len(delta.token_ids)] for delta in deltas)
                assert all(b.text.startswith(a.text) for a, b in itertools.pairwise(deltas))
                assert deltas[-1].token_ids == expected
            else:
                assert [token for delta in deltas for token in delta.token_ids] == expected
            assert (len(deltas) == 1) == (kind == "final")
        expect_idle(group)


def test_async_client_gives_the_same_choices(group: Served) -> None:
    async def ask() -> None:
        params = SamplingParams(n=3, max_tokens=NUM_TOKENS)
        async with AsyncClient(group.endpoint) as client:
            whole = await client.generate(PROMPT, params, echo=True)
            assert [output.index for output in whole.outputs] == [0, 1, 2]
            assert len({output.text for output in whole.outputs}) == 3
            ends = [delta.index async for delta in client.stream(PROMPT, params) if delta.finish_reason]
            assert sorted(ends) == [0, 1, 2]

    asyncio.run(ask())


def test_echo_begins_every_text_with_the_prompt(group: Served) -> None:
    params = SamplingParams(n=2, max_tokens=4)
    with group.client() as client:
        for output in client.generate("hello there", params, echo=True).outputs:
            assert output.text.startswith("hello there")
            assert len(output.token_ids) == 4
        plain, echoed = client.generate(PROMPT, params), client.generate(PROMPT, params, echo=True)
        for with_prompt, without in zip(echoed.outputs, plain.outputs, strict=True):
            assert len(with_prompt.text) > len(without.text)


def test_closing_a_stream_ends_all_its_choices(group: Served) -> None:
    with group.client() as client:
        deltas = client.stream(PROMPT, SamplingParams(n=8, max_tokens=1000, ignore_eos=True), request_id="mine")
        next(deltas)
        deltas.close()  # type: ignore[attr-defined]
        expect_idle(group)
        assert client.generate(PROMPT, SamplingParams(n=2, max_tokens=2)).finished  # takes in the ends on its way
        assert client.generate(PROMPT, SamplingParams(n=2, max_tokens=2), request_id="mine").finished


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(n=17), "^n: at most 16 choices are allowed, got 17$"),
        (SamplingParams(n=10**12), "^n: at most 16 choices are allowed, got 1000000000000$"),
        (SamplingParams(stop=("a", "b", "c")), "^stop: at most 2 stop strings are allowed, got 3$"),
    ],
)
def test_limits_are_those_of_the_command_line(group: Served, params: SamplingParams, message: str) -> None:
    with group.client() as client, pytest.raises(InvalidRequestError, match=message):
        client.generate(PROMPT, params)


def test_grammars_of_many_choices_hold_nobody_up(serve: Callable[..., Served]) -> None:
    """Compiled once and off the scheduler's thread: 64 times there took six seconds."""
    names = [f"p{number}" for number in range(900)]
    schema = {"type": "object", "properties": {name: {"type": "string", "pattern": "^[a-z]{2,5}$"} for name in names}}
    waits_s = []
    with RawClient(serve().endpoint) as raw:
        raw.submit("many", body(PROMPT, n=64, structured_outputs={"json_schema": schema}))
        for number in range(1000):
            started_s = time.monotonic()
            raw.submit(f"other {number}", body(PROMPT, max_tokens=1))
            raw.wait_end(f"other {number}")
            waits_s.append(time.monotonic() - started_s)
            if raw.num_ends("many") == 64:
                break
        raw.wait_end("many")
        assert raw.num_ends("many") == 64
    assert max(waits_s) < 1.5
