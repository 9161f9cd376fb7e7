"""The slow lane: groups with random options under random requests, aborts, leaving clients and processes that stall.

What must hold does not depend on any of it: one end a request, right tokens, and all blocks free afterwards.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from procengine.messages import Delta
from tests.procs.canary import expect_idle
from tests.procs.harness import NUM_SPECIAL, VOCAB_SIZE, Served, as_ids, key_of, tokens_of
from tests.procs.raw_client import RawClient, body

pytestmark = pytest.mark.slow

NUM_ROUNDS = 12


class Sent(NamedTuple):
    """A request and what bounds it."""

    client: RawClient
    prompt: list[int]
    max_tokens: int
    extra: dict[str, Any]


def random_options(rnd: random.Random) -> dict[str, Any]:
    return {
        "--num-blocks": rnd.choice([8, 12, 20, 40]),
        "--block-size": rnd.choice([1, 4, 16]),
        "--max-num-seqs": rnd.choice([2, 5, 16]),
        "--max-num-batched-tokens": rnd.choice([16, 64, 300]),
        "--async-depth": rnd.choice([1, 2, 3]),
        "--decode-steps": rnd.choice([1, 2, 4, 7]),
        "--workers": rnd.choice([1, 1, 2]),
        "--scheduling-policy": rnd.choice(["fcfs", "priority"]),
        "--mock-step-ms": rnd.choice([0, 0.5, 2]),
    }


def random_request(rnd: random.Random, client: RawClient, number: int, pool_tokens: int) -> Sent:
    length = rnd.randint(1, max(1, min(pool_tokens - 1, 150)))
    prompt = as_ids(length, rnd.choice([7, 50 + number]))  # half of them share a beginning
    extra: dict[str, Any] = {}
    if rnd.random() < 0.2:
        extra["stop_token_ids"] = [rnd.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(30)]
    if rnd.random() < 0.2:
        extra["stop"] = [chr(rnd.randrange(0x21, 0x7F)) for _ in range(rnd.randint(1, 4))]
    if rnd.random() < 0.2:
        extra["logprobs"] = rnd.randint(0, 3)
    if rnd.random() < 0.2:
        extra["priority"] = rnd.randint(-3, 3)
    return Sent(client, prompt, rnd.choice([1, 2, 5, 30, 60]), extra)


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
def test_whatever_happens_every_request_ends_once_with_right_tokens(serve: Callable[..., Served], seed: int) -> None:
    rnd = random.Random(seed)
    options = random_options(rnd)
    switches = ["--no-enable-prefix-caching"] if rnd.random() < 0.3 else []
    group = serve(*(part for pair in options.items() for part in pair), *switches)
    pool_tokens = options["--num-blocks"] * options["--block-size"]
    clients = [RawClient(group.endpoint) for _ in range(3)]
    try:
        sent = make_trouble(rnd, group, clients, pool_tokens)
        for name, request in sent.items():
            request.client.wait_end(name, 30)
        keys = [key for name, request in sent.items() if (key := check_request(name, request, pool_tokens)) is not None]
        assert len(keys) == len(set(keys)), "two requests got the same tokens"
        expect_idle(group)
        for number in range(2 * options["--workers"]):
            clients[0].submit(f"whole {number}", body(as_ids(pool_tokens, 900 + number), max_tokens=1))
            clients[0].wait_end(f"whole {number}")
        assert group.log == ""
    finally:
        for client in clients:
            client.close()


def make_trouble(rnd: random.Random, group: Served, clients: list[RawClient], pool_tokens: int) -> dict[str, Sent]:
    """Returns the requests whose clients are still there."""
    sent: dict[str, Sent] = {}
    for number in range(rnd.randint(50, 200)):
        name, client = f"q{number}", rnd.choice(clients)
        sent[name] = random_request(rnd, client, number, pool_tokens)
        client.submit(name, body(sent[name].prompt, max_tokens=sent[name].max_tokens, **sent[name].extra))
        if rnd.random() < 0.2:
            doomed = rnd.choice(list(sent))
            for _ in range(rnd.randint(1, 2)):
                sent[doomed].client.abort(doomed)
        if rnd.random() < 0.1:
            client.receive(0.002)
        if rnd.random() < 0.05:
            with group.paused(rnd.choice([role for role in group.pids if role != "supervisor"])):
                time.sleep(rnd.choice([0.005, 0.03]))
        if rnd.random() < 0.02:
            clients[clients.index(client)] = RawClient(group.endpoint)
            client.close()
            sent = {name: request for name, request in sent.items() if request.client is not client}
    return sent


def check_request(name: str, request: Sent, pool_tokens: int) -> int | None:
    """Returns its key, or None if it yielded no token."""
    end, token_ids = request.client.wait_end(name), request.client.token_ids(name)
    assert isinstance(end, Delta) and request.client.num_ends(name) == 1
    room = min(request.max_tokens, max(1, pool_tokens - len(request.prompt)))
    assert len(token_ids) == room if end.finish_reason == "length" else len(token_ids) <= room
    stops = set(request.extra.get("stop_token_ids", ()))
    assert not stops & set(token_ids[:-1]), "it went on behind a stop token"
    if end.finish_reason == "stop":
        assert isinstance(end.stop_reason, str) or token_ids[-1] in stops
    deltas = request.client.deltas(name)
    assert deltas[0].prompt_token_ids == request.prompt
    logprobs = [position for delta in deltas for position in delta.logprobs or ()]
    assert [position.token_ids[0] for position in logprobs] == (token_ids if "logprobs" in request.extra else [])
    if not token_ids:
        return None
    key = key_of(token_ids[0], len(request.prompt))
    assert token_ids == tokens_of(key, len(request.prompt), len(token_ids))
    return key
