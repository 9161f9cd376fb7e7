"""What is wrong with a request is said in OpenAI's shape, before any event, and costs nobody else anything."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.api.http_client import JSON, HttpClient
from tests.procs.canary import Canary
from tests.procs.harness import MAX_MODEL_LEN, VOCAB_SIZE

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TURN: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]

BAD_TEXT: list[tuple[Any, str | None]] = [
    # VAL-01: nothing to go on from
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["ok", ""]}, "prompt[1]"),
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 7}, "prompt"),
    # VAL-02: what is no token
    ({"prompt": [VOCAB_SIZE]}, "prompt_token_ids"),
    ({"prompt": [-1]}, "prompt_token_ids"),
    ({"prompt": [5279552648203111001]}, "prompt_token_ids"),
    ({"prompt": [2**64]}, "prompt_token_ids"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    # VAL-03, VAL-05: too long, too many
    ({"prompt": [70] * MAX_MODEL_LEN, "max_tokens": 1}, "prompt"),
    ({"prompt": [70] * (MAX_MODEL_LEN - 1), "max_tokens": 2}, "max_tokens"),
    ({"prompt": [70] * 100_000}, "prompt"),
    ({"prompt": [[1]] * 2049}, "prompt"),
    ({"prompt": "a", "n": 10**6}, "n"),
    ({"prompt": "a", "max_tokens": 10**12}, "max_tokens"),
    ({"prompt": "a", "best_of": 10**6}, "best_of"),
    ({"prompt": "a", "prompt_logprobs": 10**6}, "prompt_logprobs"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "stop": ["x" * 100_000]}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 10**5}, "stop"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    # SMP-06
    ({"prompt": "a", "logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"abc": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"70": 1e9}}, "logit_bias[70]"),
    # what is not known, or not done
    ({"prompt": "a", "temprature": 1}, "temprature"),
    ({"prompt": "a", "suffix": "x"}, "suffix"),
    ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    ({"prompt": "a", "store": True}, "store"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"regex": "("}}, None),
    ([1], None),
    ("a", None),
]

BAD_CHAT: list[tuple[Any, str | None]] = [
    ({"messages": []}, "messages"),
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": TURN, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": TURN, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"messages": TURN, "tool_choice": "required"}, "tool_choice"),
    ({"messages": TURN, "tools": [{}]}, "tools[0].function"),
    ({"messages": TURN, "functions": [{}]}, "functions"),
    ({"messages": TURN, "modalities": ["audio"]}, "modalities"),
]

RAW = [
    b"",
    b"{",
    b"nonsense",
    b'{"prompt": "a"} x',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "metadata": ' + b'{"a":' * 10**5,
    b'{"prompt": ' + b"[" * 10**6,
    *(b'{"prompt": "a", "%b": %b}' % (field, value)  # SMP-05
      for field in (b"temperature", b"top_p", b"min_p", b"repetition_penalty", b"frequency_penalty")
      for value in (b"NaN", b"Infinity", b"-Infinity", b"1e999")),
]  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
def test_wrong_fields_are_named_before_anything_is_sent(canary: Canary, http: HttpClient, streams: bool) -> None:
    for path, cases in ((TEXT, BAD_TEXT), (CHAT, BAD_CHAT)):
        for body, param in cases:
            wanted = body | {"stream": True} if streams and isinstance(body, dict) else body
            started = time.monotonic()
            answer = http.post(path, wanted)
            shown = json.dumps(body)[:100]
            assert answer.status == 400, (shown, answer.body[:300])
            assert answer.headers["content-type"] == "application/json"
            assert answer.error["type"] == "invalid_request_error", shown
            if param is not None:
                assert (answer.error["param"] or "").startswith(param), (shown, answer.error)
            assert len(answer.body) < 5000 and time.monotonic() - started < 20, shown
    canary.check()


def test_what_is_no_json_is_refused(canary: Canary, http: HttpClient) -> None:
    for body in RAW:
        answer = http.post(TEXT, body)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), (body[:60], answer.body[:200])
    canary.check()


def test_limits_name_the_real_numbers(http: HttpClient) -> None:
    answer = http.post(TEXT, {"prompt": [70] * 2040, "max_tokens": 9})
    assert answer.error["code"] == "context_length_exceeded"
    assert "2049" in answer.error["message"] and str(MAX_MODEL_LEN) in answer.error["message"]
    assert http.post(TEXT, {"prompt": [70] * 2040, "max_tokens": 8}).status == 200


def test_sizes_are_refused_before_they_are_read(canary: Canary, http: HttpClient) -> None:
    with http.raw() as connection:  # VAL-05: the head alone says too much
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000000000\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    with http.raw() as connection:  # chunks tell it when they are there
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(100):
            connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    answer = http.post(TEXT, b'{"prompt": "' + b"a" * (5 << 20) + b'"}')
    assert (answer.status, answer.error["type"]) == (413, "invalid_request_error")
    canary.check()


def test_unknown_places_models_and_methods(http: HttpClient) -> None:
    assert http.get("/v1/nothing").status == 404
    assert http.get("/").status in (200, 404)
    assert http.get("/v1/models/none").error["code"] == "model_not_found"
    answer = http.post(CHAT, {"model": "gpt-7", "messages": TURN})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    answer = http.get(CHAT)
    assert (answer.status, answer.headers["allow"]) == (405, "POST, OPTIONS")
    assert http.ask("DELETE", "/live").status == 405
    answer = http.ask("POST", TEXT, b'{"prompt": "a"}', {"Content-Type": "text/plain"})
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    answer = http.ask("POST", TEXT, b'{"prompt": "a"}', JSON | {"Content-Type": "application/json; charset=utf-8"})
    assert answer.status == 200


def test_bytes_that_are_no_http(canary: Canary, http: HttpClient) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"NONSENSE / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % at for at in range(1000)) + b"\r\n",
        b"GET /live HTTP/1.1\r\nA: " + b"b" * 100_000 + b"\r\n\r\n",
    ):
        with http.raw() as connection:
            connection.sendall(data)
            answer = connection.recv(65536)
        assert answer[:10] == b"HTTP/1.1 4", (data[:60], answer)
    canary.check()
