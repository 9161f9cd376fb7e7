"""Whatever a client sends, it gets one clear answer, and nobody else notices (VAL-01, VAL-02, VAL-03, VAL-05)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

from procengine import AsyncClient, Client, SamplingParams
from procengine.errors import InvalidRequestError, OverloadedError, ProtocolError
from procengine.messages import Attach, Attached, Delta, Embedding, GetStatus, Hello, Rejected, decode_status, encode
from tests.procs.canary import Canary
from tests.procs.harness import VOCAB_SIZE, Served, wait_until
from tests.procs.raw_client import RawClient, body

CONTEXT: Final = 256  # max_model_len; the pool holds as much
MAX_BYTES: Final = 1 << 20
MAX_QUEUED: Final = 64


pytestmark = pytest.mark.usefixtures("canary_after")


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    return serve_module(
        *("--num-blocks", CONTEXT // 16, "--max-model-len", CONTEXT, "--max-num-batched-tokens", 128),
        *("--max-num-seqs", 16, "--max-request-bytes", MAX_BYTES, "--max-queued-requests", MAX_QUEUED),
    )


@pytest.fixture(scope="module")
def remembered(group: Served) -> Canary:
    return Canary.of(group, CONTEXT - 1)


# --- requests that are of the protocol and cannot run: (id, workflow, body, what the answer must name)

_DEEP: Any = 1
for _ in range(800):
    _DEEP = [_DEEP]
_USER: Final = {"role": "user", "content": "hi"}


def _params(**fields: Any) -> dict[str, Any]:
    return body([100], **fields)


REFUSED: Final[list[tuple[str, str, Any, tuple[str, ...]]]] = [
    # VAL-01
    ("empty text", "generate", body(""), ("prompt", "empty")),
    ("empty ids", "generate", body([]), ("prompt_token_ids", "empty")),
    ("empty messages", "generate", body(messages=[]), ("messages", "empty")),
    ("no prompt", "generate", body(), ("prompt", "exactly one", "none")),
    ("two prompts", "generate", body("a", messages=[_USER]), ("exactly one", "prompt, messages")),
    ("embed nothing", "embed", {"prompt": ""}, ("prompt", "empty")),
    # VAL-03: long enough that it is certain before the text is tokenized
    ("text too long", "generate", body("a b " * 10_000), ("prompt", "40000 bytes", "at least", str(CONTEXT))),
    ("message too long", "generate", body(messages=[{**_USER, "content": "a b " * 10_000}]), ("messages", "at least")),
    ("text too long to embed", "embed", {"prompt": "a b " * 10_000}, ("prompt", "40000 bytes", "at least")),
    # VAL-02
    ("id too high", "generate", body([VOCAB_SIZE]), ("prompt_token_ids", str(VOCAB_SIZE), str(VOCAB_SIZE - 1))),
    ("id negative", "generate", body([5, -1]), ("prompt_token_ids", "-1", str(VOCAB_SIZE - 1))),
    ("id of 63 bits", "generate", body([5279552648203111001]), ("prompt_token_ids", "5279552648203111001")),
    ("id of 64 bits", "generate", body([2**64 - 1]), ("prompt_token_ids", str(2**64 - 1))),
    ("id a float", "generate", {"prompt_token_ids": [1.5]}, ("prompt_token_ids[0]", "int", "float")),
    ("id a bool", "generate", {"prompt_token_ids": [7, True]}, ("prompt_token_ids[1]", "bool")),
    ("id null", "generate", {"prompt_token_ids": [None]}, ("prompt_token_ids[0]", "None")),
    ("id a text", "generate", {"prompt_token_ids": ["7"]}, ("prompt_token_ids[0]", "str")),
    ("ids in ids", "generate", {"prompt_token_ids": [[7]]}, ("prompt_token_ids[0]", "array")),
    ("embed id too high", "embed", {"prompt_token_ids": [VOCAB_SIZE]}, ("prompt_token_ids", str(VOCAB_SIZE))),
    # VAL-03
    ("255 + 2", "generate", body([7] * 255, max_tokens=2), ("max_tokens", "257", "256")),
    ("256 + 1", "generate", body([7] * 256, max_tokens=1), ("prompt", "256")),
    ("256 and the rest", "generate", body([7] * 256, max_tokens=None), ("prompt", "256")),
    ("257 + 1", "generate", body([7] * 257, max_tokens=1), ("prompt", "257", "256")),
    ("100000 + 1", "generate", body([7] * 100_000, max_tokens=1), ("prompt", "100000", "256")),
    ("300 tokens of text", "generate", body("a" * 300), ("prompt", "300", "256")),
    ("embed 257", "embed", {"prompt_token_ids": [7] * 257}, ("prompt", "257", "256", "max_model_len")),
    (
        "states 129",  # of another layer than the last, for which a sequence is not cut
        "hidden_states",
        {"prompt_token_ids": [7] * 129, "layer": 0},
        ("prompt", "129", "128", "max_num_batched_tokens"),
    ),
    # VAL-05 and ranges
    ("max_tokens 10**12", "generate", _params(max_tokens=10**12), ("max_tokens", str(10**12), "256")),
    ("max_tokens 2**64-1", "generate", _params(max_tokens=2**64 - 1), ("max_tokens", "256")),
    ("min_tokens 256", "generate", _params(max_tokens=None, min_tokens=256), ("min_tokens", "257", "256")),
    ("min_tokens 2**31", "generate", _params(max_tokens=None, min_tokens=2**31), ("min_tokens", "256")),
    ("min_tokens 2**64-1", "generate", _params(max_tokens=None, min_tokens=2**64 - 1), ("min_tokens", "256")),
    ("max_tokens 0", "generate", _params(max_tokens=0), ("max_tokens", "at least 1", "0")),
    ("temperature nan", "generate", _params(temperature=float("nan")), ("temperature", "nan")),
    ("temperature inf", "generate", _params(temperature=float("inf")), ("temperature", "inf")),
    ("temperature -1", "generate", _params(temperature=-1.0), ("temperature", "-1")),
    ("temperature a text", "generate", _params(temperature="hot"), ("sampling_params.temperature", "float", "str")),
    ("top_p 0", "generate", _params(top_p=0.0), ("top_p", "0")),
    ("top_p 1.1", "generate", _params(top_p=1.1), ("top_p", "1.1")),
    ("min_p nan", "generate", _params(min_p=float("nan")), ("min_p", "nan")),
    ("top_k -2", "generate", _params(top_k=-2), ("top_k", "-2", "-1")),
    ("seed 2**63", "generate", _params(seed=2**63), ("seed", str(2**63))),
    ("logprobs 21", "generate", _params(logprobs=21), ("logprobs", "20", "21")),
    ("logprobs -1", "generate", _params(logprobs=-1), ("logprobs", "-1")),
    ("stop empty", "generate", _params(stop=[""]), ("stop", "non-empty")),
    ("stop a number", "generate", _params(stop=["a", 7]), ("sampling_params.stop[1]", "int")),
    ("17 stops", "generate", _params(stop=["a"] * 17), ("stop", "16", "17")),
    ("10**5 stops", "generate", _params(stop=["a"] * 10**5), ("stop", "16", "100000")),
    ("long stop", "generate", _params(stop=["é" * 2049]), ("stop", "4096", "4098")),
    ("65 stop ids", "generate", _params(stop_token_ids=[7] * 65), ("stop_token_ids", "64", "65")),
    ("10**6 stop ids", "generate", _params(stop_token_ids=[7] * 10**6), ("stop_token_ids", "64", "1000000")),
    (
        "more allowed ids than there are",
        "generate",
        _params(allowed_token_ids=[7] * 10**6),
        ("allowed_token_ids", str(VOCAB_SIZE)),
    ),
    ("10**5 bad words", "generate", _params(bad_words=["a"] * 10**5), ("bad_words", "128", "100000")),
    ("stop id too high", "generate", _params(stop_token_ids=[VOCAB_SIZE]), ("stop_token_ids", str(VOCAB_SIZE))),
    ("stop id negative", "generate", _params(stop_token_ids=[-1]), ("stop_token_ids", "-1")),
    ("priority", "generate", body([100], priority=2**32), ("priority", str(2**32))),
    # shapes
    ("body a list", "generate", [1, 2], ("object", "array")),
    ("body nil", "generate", None, ("object", "None")),
    ("body a text", "generate", "prompt", ("object", "str")),
    ("unknown field", "generate", {"prompt": "a", "n": 2}, ("unknown field", "`n`")),
    ("unknown parameter", "generate", _params(best_of=2), ("sampling_params", "best_of")),
    ("embed with parameters", "embed", _params(), ("sampling_params",)),
    ("prompt a number", "generate", {"prompt": 7}, ("prompt", "str", "int")),
    ("role missing", "generate", body(messages=[{"content": "hi"}]), ("messages[0].role",)),
    ("content a list", "generate", body(messages=[_USER, {"role": "user", "content": [1]}]), ("messages[1].content",)),
    ("messages of texts", "generate", body(messages=["hi"]), ("messages[0]", "object", "str")),
    ("messages 800 deep", "generate", body(messages=[{**_USER, "x": _DEEP}]), ("messages",)),
    ("binary in messages", "generate", body(messages=[{**_USER, "x": b"\x00"}]), ("messages", "bytes")),
    ("unknown workflow", "translate", body("a"), ("workflow", "translate", "generate")),
    ("no workflow", "", body("a"), ("workflow",)),
]


@pytest.mark.parametrize(("workflow", "bad", "named"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_request_that_cannot_run_is_refused_once_and_told_why(
    raw: RawClient, workflow: str, bad: Any, named: tuple[str, ...]
) -> None:
    raw.submit("bad", bad, workflow)
    raw.submit("good", body([100]))
    answer = raw.rejection("bad", 2.0)
    assert answer.code == "invalid_request"
    assert all(part in answer.message for part in named), answer.message
    assert len(answer.message) < 400, "the answer repeats the question"
    raw.wait_end("good")
    assert raw.num_ends("bad") == raw.num_ends("good") == 1


@pytest.mark.parametrize(
    ("good", "count"),
    [
        (body([VOCAB_SIZE - 1], max_tokens=1), 1),
        (body([7] * 254, max_tokens=1), 1),
        (body([7] * 254, max_tokens=2), 2),
        (body([7] * 254, max_tokens=None), 2),
        (body([7] * 255, max_tokens=1), 1),
        (body([7] * 255, max_tokens=None), 1),
        (body("a" * 255, max_tokens=None), 1),
        (body("\0", max_tokens=1), 1),
        (body([7], max_tokens=255), 255),
        (body([7], max_tokens=None, min_tokens=255), 255),
        (body([7], max_tokens=1, temperature=1, top_k=2**63, seed=-(2**63), logprobs=20), 1),
        (body([7], max_tokens=1, temperature=1e-38, top_p=1e-30, min_p=1), 1),
        (body([7], max_tokens=1, temperature=1e308, top_p=1e-320, min_p=1e-320), 1),
        (body("a b " * 10_000, max_tokens=1, truncate_prompt_tokens=9), 1),
        (body("a b " * 10_000, max_tokens=2, truncate_prompt_tokens=-1), 2),
    ],
    ids=str,
)
def test_a_request_at_the_limit_runs(raw: RawClient, good: Any, count: int) -> None:
    raw.submit("edge", good)
    end = raw.wait_end("edge")
    assert isinstance(end, Delta) and end.finish_reason == "length"
    assert len(raw.token_ids("edge")) == count


# --- frames that are not of the protocol


def _submit_frame(request_body: bytes) -> bytes:
    return b"\x94\xa6submit\xa3bad\xa8generate" + request_body


GARBAGE: Final[dict[str, list[bytes]]] = {
    "nothing": [b""],
    "several empty frames": [b"", b"", b""],
    "noise": [bytes(range(256))],
    "text": [b"GET / HTTP/1.1\r\n\r\n"],
    "three frames": [b"\x91\xa5hello", b"\x01", b"x"],
    "a map": [msgspec.msgpack.encode({"tag": "hello"})],
    "an empty array": [b"\x90"],
    "unknown tag": [msgspec.msgpack.encode(["goodbye", 1])],
    "tag a number": [msgspec.msgpack.encode([7, 1])],
    "tag of another socket": [msgspec.msgpack.encode(["shutdown", None])],
    "too few fields": [msgspec.msgpack.encode(["submit", "bad"])],
    "wrong field types": [msgspec.msgpack.encode(["submit", 1, 2, 3])],
    "no UTF-8 in a tag": [b"\x91\xa2\xff\xfe"],
    "no UTF-8 in an id": [b"\x94\xa6submit\xa2\xff\xfe\xa8generate\x80"],
    "cut off": [encode(Hello(1))[:-1]],
    "a list of 2**32 - 1": [_submit_frame(b"\x81\xb0prompt_token_ids\xdd\xff\xff\xff\xff")],
    "a map of 2**32 - 1": [_submit_frame(b"\xdf\xff\xff\xff\xff")],
    "a text of 2**32 - 1": [_submit_frame(b"\xdb\xff\xff\xff\xff")],
    "100000 deep in the body": [_submit_frame(b"\x81\xa8messages" + b"\x91" * 100_000 + b"\x01")],
    "100000 deep in a message": [b"\x93\xa5hello\x01" + b"\x91" * 100_000 + b"\x01"],
    "the limit, of noise": [b"\xc1" * MAX_BYTES],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_answered_and_harms_nobody(group: Served, raw: RawClient, frames: list[bytes]) -> None:
    with RawClient(group.endpoint) as other:
        other.submit("before", body([100], max_tokens=50))
        raw.send_bytes(*frames)
        answer = raw.wait_for(lambda m: isinstance(m, Rejected), 2.0)
        assert isinstance(answer, Rejected)
        assert (answer.request_id, answer.code) == ("", "protocol")
        raw.submit("good", body([100]))
        raw.wait_end("good")
        other.wait_end("before")


@pytest.mark.parametrize(
    "text", [b"\x81\xa6prompt\xa2\xff\xfe", b"\x81\xa2\xff\xfe\xa1a", b"\x81\x07\xa1a"], ids=["value", "key", "no key"]
)
def test_a_body_that_is_no_text_is_refused_under_its_id(raw: RawClient, text: bytes) -> None:
    raw.send_bytes(_submit_frame(text))
    assert raw.rejection("bad", 2.0).code == "invalid_request"


def test_garbage_at_the_output_door_harms_nobody(raw: RawClient) -> None:
    assert raw.output is not None
    raw.messages.clear()
    for frames in (*GARBAGE.values(), [b"\x93\xa6attach\x01" + b"\x91" * 100_000 + b"\x01"]):
        raw.output.send_multipart(frames)
    raw.output.send(encode(Attach(1)))
    raw.wait_for(lambda m: isinstance(m, Attached), 2.0)
    raw.submit("good", body([100]))
    raw.wait_end("good", 2.0)


FORGED: Final = {
    "ready of nobody": ["ready", "nobody", 7, 1, {}],
    "failed of nobody": ["failed", "nobody", 7, "x", "x"],
    "statistics of nobody": ["child_stats", 1, "ready", 0],
    "statistics never asked for": ["child_stats", 10**9, "ready", 0],
}


def test_garbage_at_the_supervisors_door_harms_nobody(group: Served, raw: RawClient) -> None:
    door = raw.connect(str(group.ready["control"]))
    for what, frames in [*GARBAGE.items(), *((name, [msgspec.msgpack.encode(one)]) for name, one in FORGED.items())]:
        door.send_multipart(frames)
        door.send(encode(GetStatus()))
        assert door.poll(3000), f"the supervisor does not answer any more after {what}"
        assert len(decode_status(door.recv()).processes) == len(group.pids)


def test_another_protocol_version_is_told_ours(raw: RawClient) -> None:
    raw.send(Hello(99))
    answer = raw.wait_for(lambda m: isinstance(m, Rejected))
    assert isinstance(answer, Rejected)
    assert answer.code == "protocol" and "99" in answer.message and "1" in answer.message


def test_a_client_of_another_version_says_so(group: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("procengine.client_core.PROTOCOL_VERSION", 2)
    with pytest.raises(ProtocolError, match="version"):
        Client(group.endpoint)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\xff" + bytes(8) + b"\x7f\x03", b""])
def test_bytes_that_are_not_zeromq_are_dropped(group: Served, data: bytes) -> None:
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(group.endpoint.removeprefix("ipc://"))
            door.sendall(data)


# --- sizes and numbers


def test_a_request_over_the_size_limit_is_told_the_limit(raw: RawClient) -> None:
    raw.submit("large", body("a" * MAX_BYTES))
    answer = raw.rejection("large", 2.0)
    assert str(MAX_BYTES) in answer.message and "max_request_bytes" in answer.message


def test_a_frame_over_the_backstop_costs_its_sender_the_connection_only(group: Served, raw: RawClient) -> None:
    with RawClient(group.endpoint) as other:
        other.submit("other", body([100], max_tokens=100))
        raw.submit("far too large", body("a" * (3 * MAX_BYTES)))
        other.wait_end("other")
    # The connection comes back; what was queued behind the frame may be lost with it.
    wait_until(lambda: _gets_answer(raw), "the sender is served again")


def _gets_answer(raw: RawClient) -> bool:
    request_id = os.urandom(4).hex()
    raw.submit(request_id, body([100]))
    raw.receive_for(0.25)
    return bool(raw.num_ends(request_id))


def test_a_request_id_in_use_is_refused_and_the_first_request_goes_on(raw: RawClient) -> None:
    raw.submit("twin", body([100], max_tokens=200))
    raw.submit("twin", body([100], max_tokens=1))
    raw.wait_for(lambda m: isinstance(m, Delta) and m.finish_reason == "length")
    answer = raw.rejection("twin")
    assert "request_id" in answer.message and "twin" in answer.message
    assert len(raw.token_ids("twin")) == 200
    raw.submit("twin", body([100], max_tokens=1))  # free again
    wait_until(lambda: raw.num_ends("twin") == 3, "the third is answered")


def test_an_empty_request_id_is_refused(raw: RawClient) -> None:
    # "" is how the group says "all of you": a request of that name could not be told from it.
    raw.submit("", body([100]))
    answer = raw.wait_for(lambda m: isinstance(m, Rejected | Delta), 2.0)
    assert isinstance(answer, Rejected) and "request_id" in answer.message


def test_more_requests_than_the_queue_holds_are_refused_as_overload(group: Served, raw: RawClient) -> None:
    with group.paused("worker-0"):
        for number in range(MAX_QUEUED + 3):
            raw.submit(f"r{number}", body([100 + number]))
        for number in range(MAX_QUEUED, MAX_QUEUED + 3):
            answer = raw.rejection(f"r{number}")
            assert answer.code == "overloaded" and str(MAX_QUEUED) in answer.message
        with Client(group.endpoint) as client, pytest.raises(OverloadedError, match=str(MAX_QUEUED)):
            client.generate([7], SamplingParams(max_tokens=1))
    raw.wait_ends(*(f"r{number}" for number in range(MAX_QUEUED)))
    raw.submit("later", body([100]))
    assert isinstance(raw.wait_end("later"), Delta)


def test_a_prompt_that_breaks_the_tokenizer_does_not_take_its_batch_with_it(raw: RawClient) -> None:
    """What waits while the tokenizer is busy is encoded together: one bad prompt must fail alone."""
    raw.submit("busy", body("a" * (MAX_BYTES - 200)))
    raw.submit("good before", body("hello"))
    raw.submit("bad", body(messages=[{**_USER, "x": _DEEP}]))
    raw.submit("good chat", body(messages=[_USER]))
    raw.submit("good embed", {"prompt": "hello"}, "embed")
    raw.wait_ends("busy", "good before", "bad", "good chat", "good embed")
    assert "messages" in raw.rejection("bad").message
    assert isinstance(raw.wait_end("good before"), Delta)
    assert isinstance(raw.wait_end("good chat"), Delta)
    assert isinstance(raw.wait_end("good embed"), Embedding)


# --- the same through the clients of Python

CALLS: Final[dict[str, tuple[Any, SamplingParams | None, str]]] = {
    "empty text": ("", None, "prompt"),
    "no ids": ([[]], None, "prompt_token_ids"),
    "one of two empty": (["ok", ""], None, "prompt"),
    "id too high": ([VOCAB_SIZE], None, f"prompt_token_ids: {VOCAB_SIZE}"),
    "id negative": ([-1], None, "prompt_token_ids: -1"),
    "id of 63 bits": ([5279552648203111001], None, "prompt_token_ids: 5279552648203111001"),
    "id of 65 bits": ([2**64], None, "prompt_token_ids"),
    "id a float": ([1.5], None, "prompt_token_ids"),
    "id a bool": ([True], None, "prompt_token_ids"),
    "id null": ([None], None, "prompt_token_ids"),
    "too long": ([7] * 257, None, "prompt: has 257 tokens.* 256"),
    "too many": ([7] * 255, SamplingParams(max_tokens=2), "max_tokens: 2 .* 257.* 256"),
    "too large": ("a" * MAX_BYTES, None, f"prompt: .*max_request_bytes.* {MAX_BYTES}"),
    "half a surrogate pair": ("a\ud800", None, "prompt: character 1 .*U\\+D800"),
    "a map with more": ({"prompt": "a", "n": 2}, None, "`n`"),
}


@pytest.mark.parametrize(("prompt", "params", "named"), CALLS.values(), ids=CALLS.keys())
def test_the_client_raises_what_the_group_refused(
    group: Served, prompt: Any, params: SamplingParams | None, named: str
) -> None:
    with Client(group.endpoint) as client:
        with pytest.raises(InvalidRequestError, match=named):
            client.generate(prompt, params)
        assert len(client.generate([7]).outputs[0].token_ids) == 16, "the client is of no use any more"


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        *(row for name, row in CALLS.items() if name not in ("no ids", "one of two empty")),
        ([], None, "prompt_token_ids"),
    ],
    ids=[*(name for name in CALLS if name not in ("no ids", "one of two empty")), "no ids"],
)
def test_the_async_client_raises_it_too_plain_and_streaming(
    group: Served, prompt: Any, params: SamplingParams | None, named: str
) -> None:
    async def call() -> None:
        async with AsyncClient(group.endpoint) as client:
            with pytest.raises(InvalidRequestError, match=named):
                await client.generate(prompt, params)
            with pytest.raises(InvalidRequestError, match="prompt" if prompt == [] else named):
                async for _ in client.stream(prompt, params):
                    pass
            assert len((await client.generate([7])).outputs[0].token_ids) == 16, "the client is of no use any more"

    asyncio.run(call())


def test_messages_are_refused_through_the_client(group: Served) -> None:
    with Client(group.endpoint) as client:
        with pytest.raises(InvalidRequestError, match="messages"):
            client.chat([])
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content"):
            client.chat([{"role": "user"}])
        with pytest.raises(InvalidRequestError, match="exactly one of prompt and messages"):
            next(client.stream("a", messages=[_USER]))
