"""Tokens and texts through real processes: none lost, none doubled, none of somebody else's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from procengine import AsyncClient, Client, RequestOutput, SamplingParams
from procengine.tokenizer import Tokenizer
from tests.procs.canary import expect_idle
from tests.procs.harness import EOS, Served, as_ids, cpu_seconds, key_of, tokens_of, wait_until
from tests.procs.raw_client import RawClient, body

GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    return serve_module("--max-num-seqs", 64, "--num-blocks", 1024)


@pytest.fixture(scope="module")
def tokenizer(group: Served) -> Tokenizer:
    return Tokenizer.load(f"{group.ready['model']}/tokenizer.json")


def expect_right_tokens(token_ids: Sequence[int], num_prompt_tokens: int, count: int) -> int:
    """They are all of one request, in order. Returns its key."""
    key = key_of(token_ids[0], num_prompt_tokens)
    assert list(token_ids) == tokens_of(key, num_prompt_tokens, count)
    return key


# --- one request


def test_a_plain_request_through_the_client(group: Served, tokenizer: Tokenizer) -> None:
    with group.client() as client:
        result = client.generate("hello", GREEDY)
        (output,) = result.outputs
        expect_right_tokens(output.token_ids, 5, 20)
        assert result.prompt == "hello"
        assert result.prompt_token_ids == tokenizer.encode("hello")
        assert output.text == tokenizer.decode(output.token_ids)
        assert (output.finish_reason, output.stop_reason, output.logprobs) == ("length", None, None)
        assert result.finished and result.num_cached_tokens == 0


def test_a_stream_through_the_client_gives_the_same_text_in_pieces(group: Served, tokenizer: Tokenizer) -> None:
    with group.client() as client:
        deltas = list(client.stream(as_ids(33), SamplingParams(temperature=0, max_tokens=200)))
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    expect_right_tokens(token_ids, 33, 200)
    assert "".join(delta.text for delta in deltas) == tokenizer.decode(token_ids)
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert deltas[-1].finish_reason == "length"


def test_the_async_client_plain_and_streaming(group: Served, tokenizer: Tokenizer) -> None:
    async def call() -> tuple[RequestOutput, list[int], str]:
        async with AsyncClient(group.endpoint) as client:
            plain = await client.generate(as_ids(17), GREEDY)
            token_ids, text = list[int](), ""
            async for delta in client.stream("streamed", GREEDY):
                token_ids += delta.token_ids
                text += delta.text
            return plain, token_ids, text

    plain, token_ids, text = asyncio.run(call())
    expect_right_tokens(plain.outputs[0].token_ids, 17, 20)
    expect_right_tokens(token_ids, 8, 20)
    assert text == tokenizer.decode(token_ids)


def test_a_chat_is_rendered_by_the_models_template(group: Served, tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with group.client() as client:
        result = client.chat(messages, GREEDY)
        streamed = list(client.stream(messages=messages, params=GREEDY))
    prompt = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>"
    assert result.prompt_token_ids == tokenizer.encode(prompt, add_special_tokens=False)
    expect_right_tokens(result.outputs[0].token_ids, len(result.prompt_token_ids), 20)
    assert sum(len(delta.token_ids) for delta in streamed) == 20


def test_an_embedding_and_a_generation_share_the_group(group: Served) -> None:
    with group.client() as client:
        ids = as_ids(9)
        vector, text = client.embed(ids), client.embed("ab")
        assert vector.embedding == [float(sum(ids))] * 8  # what the mock computes
        assert text.embedding == [float(sum(text.prompt_token_ids))] * 8
        assert [one.embedding[0] for one in client.embed([[100], [200], [300]])] == [100.0, 200.0, 300.0]


def test_logprobs_come_with_their_tokens(group: Served) -> None:
    with group.client() as client:
        (output,) = client.generate(as_ids(5), SamplingParams(temperature=0, max_tokens=7, logprobs=2)).outputs
        assert output.logprobs is not None
        assert [next(iter(position)) for position in output.logprobs] == output.token_ids
        (output,) = client.generate(as_ids(5), SamplingParams(temperature=0, max_tokens=3, logprobs=0)).outputs
        assert output.logprobs is not None and len(output.logprobs) == 3, "0 alternatives are not no logprobs"


# --- the ends of a request


def next_tokens(group: Served, num_prompt_tokens: int, count: int) -> list[int]:
    """What the next request that the group accepts will yield."""
    with group.client() as client:
        (token_id,) = client.generate(as_ids(3), SamplingParams(temperature=0, max_tokens=1)).outputs[0].token_ids
    return tokens_of(key_of(token_id, 3) + 1, num_prompt_tokens, count)


def test_a_stop_token_ends_the_request_everywhere(group: Served, tokenizer: Tokenizer) -> None:
    expected = next_tokens(group, 5, 100)
    with group.client() as client:
        params = SamplingParams(temperature=0, max_tokens=1000, stop_token_ids=(7, expected[41]))
        (output,) = client.generate(as_ids(5), params).outputs
        assert output.token_ids == expected[:42]
        assert (output.finish_reason, output.stop_reason) == ("stop", expected[41])
        assert output.text == tokenizer.decode(expected[:41]), "the stop token is not part of the text"
    expect_idle(group)


def test_a_stop_string_ends_the_request_in_the_frontend_too(group: Served, tokenizer: Tokenizer) -> None:
    """The stop spans three tokens; the output process finds it, the frontend must free the blocks."""
    expected = next_tokens(group, 5, 2000)
    before, *across = (tokenizer.decode(expected[a:b]) for a, b in ((0, 50), (50, 51), (51, 52), (52, 53)))
    stop = across[0][-1] + across[1] + across[2][0]
    for includes in (False, True):
        expected = next_tokens(group, 5, 2000) if includes else expected
        whole = tokenizer.decode(expected)
        with group.client() as client:
            stop = whole[len(before) : len(before) + 4]
            params = SamplingParams(
                temperature=0, max_tokens=None, stop=("never seen", stop), include_stop_str_in_output=includes
            )
            deltas = list(client.stream(as_ids(5), params))
        assert "".join(delta.text for delta in deltas) == whole[: whole.index(stop) + (len(stop) if includes else 0)]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
        expect_idle(group, 1.0)  # and not when its 2000 tokens are through


def test_eos_cannot_come_by_chance_but_ids_above_the_vocabulary_of_the_tokenizer_do_no_harm(group: Served) -> None:
    with group.client() as client:
        result = client.generate([EOS, 63, *as_ids(3)], GREEDY)
        expect_right_tokens(result.outputs[0].token_ids, 5, 20)


# --- many at once


def test_many_requests_on_one_connection_come_back_in_order(group: Served) -> None:
    with group.client() as client:
        prompts = [as_ids(1 + number % 70, number) for number in range(200)]
        results = client.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        keys = [
            expect_right_tokens(result.outputs[0].token_ids, len(prompt), 12)
            for prompt, result in zip(prompts, results, strict=True)
        ]
        assert keys == list(range(keys[0], keys[0] + 200)), "requests were accepted in another order than sent"
        assert [result.prompt_token_ids for result in results] == prompts


def test_every_request_has_one_terminal_message_and_nothing_after_it(raw: RawClient) -> None:
    for number in range(100):
        if number % 3:
            raw.submit(f"r{number}", body(as_ids(number, 3), max_tokens=1 + number % 9))
        else:
            raw.submit(f"r{number}", body("x" * (1 + number), max_tokens=1 + number % 9))
    raw.wait_ends(*(f"r{number}" for number in range(100)))
    raw.submit("last", body("y"))
    raw.wait_end("last")
    for number in range(100):
        deltas = raw.deltas(f"r{number}")
        assert raw.num_ends(f"r{number}") == 1 and deltas[-1].finish_reason
        assert deltas[0].prompt_token_ids is not None and deltas[0].num_cached_tokens is not None
        assert all(delta.prompt_token_ids is None for delta in deltas[1:])
        expect_right_tokens(raw.token_ids(f"r{number}"), len(deltas[0].prompt_token_ids), 1 + number % 9)


def test_several_clients_at_once_get_their_own_answers(group: Served) -> None:
    """Sync clients in threads, one of them shared by two, and an async one with many tasks."""
    keys: list[int] = []
    failures: list[Exception] = []

    def ask(client: Client, start: int) -> None:
        try:
            for number in range(start, start + 20):
                ids = as_ids(1 + number % 40, number)
                result = client.generate(ids, GREEDY)
                assert result.prompt_token_ids == ids
                keys.append(expect_right_tokens(result.outputs[0].token_ids, len(ids), 20))
        except Exception as error:  # noqa: BLE001 - a thread's failure is the test's
            failures.append(error)

    async def ask_async() -> None:
        async with AsyncClient(group.endpoint) as client:

            async def one(number: int) -> None:
                ids = as_ids(1 + number % 40, number)
                token_ids: list[int] = []
                async for delta in client.stream(ids, GREEDY):
                    token_ids += delta.token_ids
                keys.append(expect_right_tokens(token_ids, len(ids), 20))

            await asyncio.gather(*(one(number) for number in range(60)))

    with group.client() as shared, group.client() as own:
        threads = [
            threading.Thread(target=ask, args=(client, start))
            for client, start in ((shared, 100), (shared, 200), (own, 300))
        ]
        for thread in threads:
            thread.start()
        asyncio.run(ask_async())
        for thread in threads:
            thread.join(30)
    assert not failures, failures[0]
    assert len(keys) == len(set(keys)) == 120


def test_a_stream_does_not_hold_up_another_thread_of_the_client(group: Served) -> None:
    with group.client() as client:
        stream = client.stream(as_ids(4), SamplingParams(temperature=0, max_tokens=500))
        first = next(stream)
        for number in range(5):
            expect_right_tokens(client.generate(as_ids(6, number), GREEDY).outputs[0].token_ids, 6, 20)
        assert client.stats()["num_steps"] > 0
        token_ids = [*first.token_ids, *(token_id for delta in stream for token_id in delta.token_ids)]
        expect_right_tokens(token_ids, 4, 500)


# --- the prefix cache


def test_a_prompt_seen_before_is_found_in_the_cache(group: Served) -> None:
    """SCH-05: whole blocks and one token more or less, three times in a row; never the whole prompt."""
    with group.client() as client:
        for length in (15, 16, 17, 31, 32, 33, 48, 63, 64, 65):
            ids = as_ids(length, 1000 + length)
            cached = []
            for _ in range(3):
                result = client.generate(ids, SamplingParams(temperature=0, max_tokens=16, logprobs=1))
                expect_right_tokens(result.outputs[0].token_ids, length, 16)
                cached.append(result.num_cached_tokens)
            assert cached == [0, *[(length - 1) // 16 * 16] * 2]
            salted = client.generate(ids, GREEDY, cache_salt="mine")
            assert salted.num_cached_tokens == 0, "another salt shares nothing"


def test_the_output_of_a_request_is_cached_as_well(group: Served) -> None:
    with group.client() as client:
        first = client.generate(as_ids(10, 2000), SamplingParams(temperature=0, max_tokens=60))
        turn = [*first.prompt_token_ids, *first.outputs[0].token_ids, 99]
        assert client.generate(turn, GREEDY).num_cached_tokens == 64


def test_equal_prompts_at_once_are_computed_once(group: Served) -> None:
    """SCH-06: they share blocks that are not filled yet; each must still get its own tokens."""
    with group.client() as client:
        client.stats(reset=True)
        prompt = as_ids(300, 3000)
        results = client.generate([prompt, prompt, prompt, [*prompt, 99]], GREEDY)
        keys = [expect_right_tokens(r.outputs[0].token_ids, len(r.prompt_token_ids), 20) for r in results]
        assert len(set(keys)) == 4
        assert sorted(result.num_cached_tokens or 0 for result in results) == [0, 288, 288, 288]
        assert client.stats()["prefix_hit_tokens"] == 3 * 288


# --- every mode of the engine, each with a pool so small that requests are preempted

MODES: dict[str, tuple[object, ...]] = {
    "synchronous": ("--async-depth", 1),
    "one step ahead, by priority": (
        "--async-depth",
        2,
        "--max-num-batched-tokens",
        48,
        "--scheduling-policy",
        "priority",
    ),
    "two steps ahead": ("--async-depth", 3, "--no-enable-prefix-caching"),
    "whole prompts": ("--async-depth", 2, "--no-enable-chunked-prefill", "--max-model-len", 256),
    "four tokens a step": ("--async-depth", 1, "--decode-steps", 4, "--max-num-batched-tokens", 64),
    "four tokens, three steps, two workers": ("--async-depth", 3, "--decode-steps", 4, "--workers", 2),
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_tokens_are_right_in_every_mode_under_preemption(
    serve: Callable[..., Served], options: tuple[object, ...]
) -> None:
    """SCH-02 and SCH-03: lengths round block borders, 40 tokens each, and a pool for about three of the requests."""
    num_workers = 2 if "--workers" in options else 1
    group = serve("--num-blocks", 16, "--max-num-seqs", 24, *options)
    lengths = [15, 16, 17, 31, 32, 33, 47, 48, 49] * 3 * num_workers
    with RawClient(group.endpoint) as raw:
        for number, length in enumerate(lengths):
            ids = as_ids(length, 7 if number % 3 == 0 else 100 + number)  # a third share their beginnings
            raw.submit(
                f"r{number}", body(ids, max_tokens=40, priority=number % 4, logprobs=1 if number % 5 == 0 else None)
            )
        raw.wait_ends(*(f"r{number}" for number in range(len(lengths))))
        for number, length in enumerate(lengths):
            assert raw.token_ids(f"r{number}") == tokens_of(number, length, 40)
            assert raw.num_ends(f"r{number}") == 1
            logprobs = [row for delta in raw.deltas(f"r{number}") for row in delta.logprobs or ()]
            assert [row.token_ids[0] for row in logprobs] == (tokens_of(number, length, 40) if number % 5 == 0 else [])
        assert raw.stats()["num_preemptions"] > 0, "the pool was not small enough to test anything"
        # The frontend may take the last result in a moment after the output process did.
        wait_until(lambda: raw.stats()["output_tokens"] >= 40 * len(lengths), "the frontend knows all tokens")
        assert raw.stats()["output_tokens"] == 40 * len(lengths), "tokens were computed twice, or for nobody"
        for number in range(2 * num_workers):  # one prompt in all blocks of a worker: none is lost
            raw.submit(f"whole {number}", body(as_ids(255, 900 + number), max_tokens=1))
            raw.wait_end(f"whole {number}")
    expect_idle(group)
    assert "Traceback" not in group.log


def test_two_workers_share_the_work_and_a_prefix_goes_where_it_is_cached(serve: Callable[..., Served]) -> None:
    group = serve("--workers", 2, "--num-blocks", 256, "--mock-step-ms", 1)
    assert set(group.pids) == {"supervisor", "frontend", "output", "worker-0", "worker-1"}
    assert group.ready["num_blocks"] == 512
    with group.client() as client:
        for number in range(4):  # one after the other: both are idle, the cache alone decides
            result = client.generate(as_ids(100, 50), SamplingParams(temperature=0, max_tokens=2))
            assert result.num_cached_tokens == (96 if number else 0)
        used = {role: cpu_seconds(pid) for role, pid in group.pids.items()}
        client.generate([as_ids(20, 60 + n) for n in range(16)], SamplingParams(temperature=0, max_tokens=100))
        for role in ("worker-0", "worker-1"):
            assert cpu_seconds(group.pids[role]) - used[role] > 2e-3, f"{role} has done nothing"
