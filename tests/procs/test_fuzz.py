"""Groups with random options under random requests, aborts, leaving clients and processes that stall.

And one group under thousands of valid, invalid and broken requests.

What must hold does not depend on any of it: one end a request, right tokens, and all blocks free afterwards.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from procengine.messages import Delta, Embedding, Rejected, encode
from tests.procs.canary import Canary, expect_idle
from tests.procs.harness import NUM_SPECIAL, VOCAB_SIZE, Served, as_ids, key_of, tokens_of
from tests.procs.raw_client import RawClient, body

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


@pytest.mark.slow
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


# --- thousands of requests, right and wrong, at one group

CONTEXT = 256  # max_model_len; the pool holds as much
_CHUNK = 250
_USER = {"role": "user", "content": "hi"}
_ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**64 - 1, -(2**63), 1e308, 5e-324, float("nan"), float("inf"), -0.0, "", "x", "é",
    b"\x00\xff", [], [[]], [None], ["a", 7], [-1], [2**40], {}, {"a": 1}, {7: 1.0}, {"-1": float("nan")}, [[[[]]]],
]  # fmt: skip
_REFUSED: list[dict[str, Any]] = [
    {"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": -1}, {"top_k": -2},
    {"n": 0}, {"n": 10**6}, {"max_tokens": 0}, {"max_tokens": 10**12}, {"min_tokens": 99}, {"seed": 2**63},
    {"max_tokens": None, "min_tokens": 2**31}, {"max_tokens": None, "min_tokens": 2**64 - 1},
    {"stop": [""]}, {"stop": ["a"] * 17}, {"stop_token_ids": [VOCAB_SIZE]}, {"logprobs": 21}, {"prompt_logprobs": -1},
    {"presence_penalty": 3}, {"frequency_penalty": float("inf")}, {"repetition_penalty": 0}, {"best_of": 2},
    {"logit_bias": {VOCAB_SIZE: 1.0}}, {"logit_bias": {5: 101}}, {"allowed_token_ids": []}, {"bad_words": [""]},
    {"truncate_prompt_tokens": 0}, {"output_kind": "all"}, {"stream_interval": 0}, {"structured_outputs": {}},
    {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"json_schema": {"type": "nothing"}}},
    {"structured_outputs": {"choice": []}}, {"detokenize": False, "stop": "a"}, {"priority": 2**40},
]  # fmt: skip
_VALID: list[Callable[[random.Random], dict[str, Any]]] = [
    lambda rnd: {"temperature": rnd.choice([0, 0.5, 1, 1e308, 5e-324])},
    lambda rnd: {"top_p": rnd.random() or 1.0, "min_p": rnd.random(), "top_k": rnd.choice([-1, 0, 1, 5, 2**62])},
    lambda rnd: {"seed": rnd.randrange(-(2**63), 2**63)},
    lambda rnd: {"stop": [chr(rnd.randrange(0x21, 0x7F)) for _ in range(rnd.randint(1, 16))]},
    lambda rnd: {"stop_token_ids": [rnd.randrange(VOCAB_SIZE) for _ in range(rnd.randint(1, 64))]},
    lambda rnd: {"logprobs": rnd.randint(0, 20), "prompt_logprobs": rnd.choice([None, 0, 20])},
    lambda rnd: {"presence_penalty": rnd.uniform(-2, 2), "frequency_penalty": rnd.uniform(-2, 2)},
    lambda rnd: {"repetition_penalty": rnd.uniform(0.1, 5)},
    lambda rnd: {"logit_bias": {rnd.randrange(VOCAB_SIZE): rnd.uniform(-100, 100) for _ in range(9)}},
    lambda rnd: {"allowed_token_ids": [rnd.randrange(VOCAB_SIZE) for _ in range(9)]},
    lambda rnd: {"bad_words": ["a", "bc", "日"][: rnd.randint(1, 3)]},
    lambda rnd: {"min_tokens": 1, "ignore_eos": rnd.random() < 0.5, "include_stop_str_in_output": True},
    lambda rnd: {"truncate_prompt_tokens": rnd.choice([-1, 1, 7, 10**6]), "skip_special_tokens": False},
    lambda rnd: {"detokenize": False},
    lambda rnd: {"output_kind": rnd.choice(["delta", "cumulative", "final"]), "stream_interval": rnd.randint(1, 9)},
    lambda rnd: {"priority": rnd.randint(-(2**31), 2**31), "cache_salt": rnd.choice(["", "s", "é"])},
    lambda rnd: {"n": rnd.randint(2, 4)},
]
_STRUCTURED: list[dict[str, Any]] = [
    {"regex": "[a-z]{1,3}"}, {"choice": ["yes", "no"]}, {"json_object": True}, {"json_schema": {"type": "integer"}},
]  # fmt: skip


class Ledger:
    """One connection: what was sent on it, and how often each of it was answered."""

    def __init__(self, group: Served) -> None:
        self.client = RawClient(group.endpoint)
        self.bodies: dict[str, tuple[str, dict[str, Any]]] = {}  # id -> (what it is, its body)
        self.num_garbage = 0

    def take_in(self) -> tuple[dict[str, list[Rejected | Delta | Embedding]], int]:
        """All ends so far by id, and the number of refusals that name no id."""
        self.client.receive()
        ends: dict[str, list[Rejected | Delta | Embedding]] = {}
        num_nameless = 0
        for message in self.client.messages:
            if isinstance(message, Rejected) and not message.request_id:
                num_nameless += 1
            elif isinstance(message, Rejected | Embedding) or (isinstance(message, Delta) and message.finish_reason):
                ends.setdefault(message.request_id, []).append(message)
        return ends, num_nameless

    def is_answered(self) -> bool:
        """Every frame: a request under its id, once for each choice; what was unreadable without one."""
        ends, num_nameless = self.take_in()
        mangled = {name for name, (kind, _) in self.bodies.items() if kind == "mangled"}
        if num_nameless + len(mangled & ends.keys()) < self.num_garbage + len(mangled):
            return False
        return all(_is_whole(ends.get(name, []), asked) for name, asked in self.bodies.items() if name not in mangled)

    def check(self) -> None:
        """Nothing was answered twice, and each with what it deserves."""
        ends, num_nameless = self.take_in()
        num_mangled = sum(kind == "mangled" for kind, _ in self.bodies.values())
        num_ended = sum(self.bodies[name][0] == "mangled" for name in ends)
        assert ends.keys() <= self.bodies.keys()
        assert num_nameless + num_ended == self.num_garbage + num_mangled
        for name, of_one in ends.items():
            kind, asked = self.bodies[name]
            _check_ends(kind, asked, of_one, self.client, name)
        self.client.messages.clear()
        self.bodies.clear()
        self.num_garbage = 0


def _is_whole(ends: list[Rejected | Delta | Embedding], asked: tuple[str, dict[str, Any]]) -> bool:
    if not ends or not isinstance(ends[0], Delta):
        return bool(ends)
    num_choices = asked[1].get("sampling_params", {}).get("n", 1) if asked[0] in ("valid", "structured") else 1
    return len(ends) >= num_choices


def _check_ends(
    kind: str, asked: dict[str, Any], ends: list[Rejected | Delta | Embedding], client: RawClient, name: str
) -> None:
    if not isinstance(ends[0], Delta):
        assert len(ends) == 1, ends
        assert kind != "valid" or not isinstance(ends[0], Rejected), (asked, ends)
        return
    assert sorted(end.index for end in ends if isinstance(end, Delta)) == list(range(len(ends))), (asked, ends)
    assert kind != "refused", (asked, ends)
    if kind != "valid":
        return
    params = asked["sampling_params"]
    deltas = client.deltas_by_index(name)
    for end in ends:
        assert isinstance(end, Delta) and end.finish_reason in ("stop", "length", "abort"), (asked, end)
        of_one = deltas[end.index]
        is_delta = params.get("output_kind", "delta") == "delta"
        count = sum(len(delta.token_ids) for delta in of_one) if is_delta else len(of_one[-1].token_ids)
        assert count == params["max_tokens"] if end.finish_reason == "length" else count <= params["max_tokens"]


def random_valid(rnd: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for make in rnd.sample(_VALID, rnd.choice([0, 1, 2, 5])):
        fields |= make(rnd)
    if not fields.get("detokenize", True):
        fields.pop("stop", None)
    prompt: dict[str, Any] = rnd.choice(
        [
            {"prompt": as_ids(rnd.choice([1, 5, 16, 17, 100]), rnd.choice([7, rnd.randrange(4000)]))},
            {"prompt": rnd.choice(["hello", "日本語" * 5, "\0", "a " * 30])},
            {"messages": [_USER]},
        ]
    )
    return body(**prompt, max_tokens=rnd.choice([1, 2, 3, 8, 20]), **fields)


def mutated_value(rnd: random.Random, good: dict[str, Any]) -> dict[str, Any]:
    """A body with one odd value somewhere; it may be right all the same."""
    bad = msgspec.msgpack.decode(msgspec.msgpack.encode(good), strict=False)
    target = bad["sampling_params"] if rnd.random() < 0.7 else bad
    names = [
        *target,
        "n",
        "min_tokens",
        "max_tokens",
        "stop",
        "logprobs",
        "logit_bias",
        "structured_outputs",
        "prompt",
        "tools",
        "echo",
        "what",
    ]
    target[rnd.choice(names)] = rnd.choice(_ODD)
    return dict(bad)


def mangled_bytes(rnd: random.Random, data: bytes) -> bytes:
    """Some bytes flipped, put in, left out, cut off or doubled."""
    changed = bytearray(data)
    for _ in range(rnd.choice([1, 1, 1, 2, 5])):
        at = rnd.randrange(len(changed)) if changed else 0
        match rnd.randrange(5):
            case 0 if changed:
                changed[at] ^= 1 << rnd.randrange(8)
            case 1:
                changed.insert(at, rnd.randrange(256))
            case 2:
                del changed[at : at + rnd.randint(1, 4)]
            case 3:
                del changed[at:]
            case _:
                changed[at:at] = changed[at : at + rnd.randint(1, 16)]
    return bytes(changed)


def throw(rnd: random.Random, ledger: Ledger, name: str) -> None:
    """One frame at the group: a request of some kind, or noise."""
    good, client, dice = random_valid(rnd), ledger.client, rnd.random()
    if dice < 0.45:
        ledger.bodies[name] = ("valid", good)
        client.submit(name, good)
    elif dice < 0.48:
        good["sampling_params"]["structured_outputs"] = rnd.choice(_STRUCTURED)
        ledger.bodies[name] = ("structured", good)
        client.submit(name, good)
    elif dice < 0.51:
        ledger.bodies[name] = ("embed", {})
        client.submit(name, rnd.choice([{"prompt": "hello"}, {"prompt_token_ids": as_ids(20)}, good]), "embed")
    elif dice < 0.66:
        bad = body(as_ids(5), **({"max_tokens": 9} | rnd.choice(_REFUSED)))
        ledger.bodies[name] = ("refused", bad)
        client.submit(name, bad)
    elif dice < 0.8:
        ledger.bodies[name] = ("odd", good)
        client.submit(name, mutated_value(rnd, good))
    elif dice < 0.96:
        head = encode(["submit", name, "generate"]).replace(b"\x93", b"\x94", 1)
        ledger.bodies[name] = ("mangled", good)
        client.send_bytes(head + mangled_bytes(rnd, encode(good)))
    else:
        ledger.num_garbage += 1
        client.send_bytes(*rnd.choice([[rnd.randbytes(rnd.randint(0, 300))], [b"", b"x"], [b"\xc1" * 5000]]))


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2000, ()),
        pytest.param(20_000, ("--decode-steps", 4), marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(
            20_000, ("--workers", 2, "--speculative-tokens", 3), marks=[pytest.mark.slow, pytest.mark.timeout(600)]
        ),
    ],
)
def test_every_frame_is_answered_once_and_the_group_is_as_before(
    serve: Callable[..., Served], count: int, options: tuple[object, ...]
) -> None:
    group = serve(
        *("--num-blocks", CONTEXT // 16, "--max-model-len", CONTEXT, "--max-num-batched-tokens", 128, "--max-n", 8),
        *("--max-num-seqs", 16, "--mock-step-ms", 0, *options),
    )
    canary = Canary.of(group, CONTEXT - 1)
    rnd = random.Random(count)
    ledgers = [Ledger(group) for _ in range(3)]
    try:
        for start in range(0, count, _CHUNK):
            throw_chunk(rnd, group, ledgers, range(start, start + _CHUNK))
    finally:
        for ledger in ledgers:
            ledger.client.close()
    canary.check()


def throw_chunk(rnd: random.Random, group: Served, ledgers: list[Ledger], numbers: range) -> None:
    for number in numbers:
        place = rnd.randrange(len(ledgers))
        ledger = ledgers[place]
        throw(rnd, ledger, f"fuzz request {number}")
        if rnd.random() < 0.1:
            for _ in range(rnd.randint(1, 2)):
                ledger.client.abort(rnd.choice([*ledger.bodies, "nobody", ""]))
        if rnd.random() < 0.005:
            ledger.client.close()
            ledgers[place] = Ledger(group)
    for ledger in ledgers:
        deadline_s = time.monotonic() + 60
        while not ledger.is_answered():
            assert time.monotonic() < deadline_s, unanswered(ledger)
            ledger.client.receive(0.05)
    expect_idle(group)
    for ledger in ledgers:
        ledger.client.stats()  # behind whatever the frontend has still sent
        ledger.check()


def unanswered(ledger: Ledger) -> str:
    ends, num_nameless = ledger.take_in()
    missing = {name: asked for name, asked in ledger.bodies.items() if not _is_whole(ends.get(name, []), asked)}
    return f"{num_nameless} nameless of {ledger.num_garbage}; not answered: {list(missing.items())[:5]}"
