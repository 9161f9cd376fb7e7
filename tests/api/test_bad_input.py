"""What is wrong with a request is said in OpenAI's shape, before any event, and costs nobody else anything."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.api.http_client import JSON, HttpClient, strict_json
from tests.procs.canary import Canary
from tests.procs.harness import MAX_MODEL_LEN, VOCAB_SIZE, Served

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
    *(
        ({"prompt": "a", "logit_bias": {key: 1}}, "logit_bias")
        for key in ("\uff17", "007", "7.0", " 7", "1e2", "9" * 400, "")
    ),
    ({"prompt": "a", "logit_bias": {"70": None}}, "logit_bias"),
    # numbers at the ends of their types
    *(({"prompt": "a", "seed": seed}, "seed") for seed in (2**63, 2**64, -(2**63) - 1, 1e30, 1.5, -0.0)),
    *(({"prompt": "a", "priority": number}, "priority") for number in (2**31 + 1, 2**63, 2**70, -(2**63))),
    *(({"prompt": "a", "truncate_prompt_tokens": number}, "truncate_prompt_tokens") for number in (0, -2, 2**80)),
    *(({"prompt": "a", "stop_token_ids": [number]}, "stop_token_ids") for number in (-1, 10**11, 2**64)),
    *(({"prompt": "a", "allowed_token_ids": ids}, "allowed_token_ids") for ids in ([], [-1], [10**11])),
    *(({"prompt": "a", "max_tokens": number}, "max_tokens") for number in (1.0, -1, 2**63, 2**64)),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "a", "temperature": "0.5"}, "temperature"),
    ({"prompt": "a", "temperature": -0.5}, "temperature"),
    ({"prompt": "a", "bad_words": [""]}, "bad_words"),
    ({"prompt": "a", "bad_words": ["x"] * 1000}, "bad_words"),
    ({"prompt": "a", "stream": "true"}, "stream"),
    ({"prompt": [[[1]]]}, "prompt[0][0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [70, 70.0]}, "prompt[1]"),
    # grammars that are none, or that reach for elsewhere
    ({"prompt": "a", "guided_regex": "(?=a)b"}, "regex"),
    ({"prompt": "a", "guided_grammar": "%%%"}, "grammar"),
    ({"prompt": "a", "guided_choice": []}, "choice"),
    *(
        ({"prompt": "a", "guided_json": schema}, "json_schema")
        for schema in (
            {"$ref": "#"},
            {"$ref": "http://example.com/x"},
            {"$ref": "file:///etc/passwd"},
            "{",
            "1",
            {"type": "wat"},
        )
    ),
    # what is not known, or not done
    ({"prompt": "a", "": 1}, None),
    ({"prompt": "a", "k" * 100_000: 1}, None),
    ({"prompt": "a", "__proto__": 1}, "__proto__"),
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

FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
NO_CALLS: list[Any] = [
    5,
    {},
    [1],
    [None],
    [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}],
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
    ({"messages": [{"role": 1, "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [None]}]}, "messages[0].content[0]"),
    *(
        ({"messages": [*TURN, {"role": "assistant", "tool_calls": calls}]}, "messages[1].tool_calls")
        for calls in NO_CALLS
    ),
    ({"messages": TURN * 3000}, "messages"),
    ({"messages": TURN, "tools": [FUNCTION, FUNCTION]}, "tools[1].function.name"),
    ({"messages": TURN, "tools": [FUNCTION], "tool_choice": "maybe"}, "tool_choice"),
    (
        {"messages": TURN, "tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    ({"messages": TURN, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": TURN, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"messages": TURN, "tool_choice": "required"}, "tool_choice"),
    ({"messages": TURN, "tools": [{}]}, "tools[0].function"),
    ({"messages": TURN, "functions": [{}]}, "functions"),
    ({"messages": TURN, "modalities": ["audio"]}, "modalities"),
]

OK_BODY = b'{"prompt": "a"}'
RAW = [
    b" \n",
    b"null",
    b"'a'",
    OK_BODY + b"\0",
    OK_BODY * 2,
    b"\xef\xbb\xbf" + OK_BODY,  # a byte order mark
    OK_BODY.decode().encode("utf-16"),
    OK_BODY.decode().encode("utf-32-le"),
    b'{"prompt": "a",}',
    b'{"prompt": "a" /* b */}',
    b"{'prompt': 'a'}",
    b'{"prompt": "a\nb"}',
    b'{"prompt": "\0"}',
    b'{"prompt": "\xc0\x80"}',  # too long for what it is
    b'{"prompt": "\xed\xa0\xbd\xed\xb8\x80"}',  # surrogates in UTF-8
    b'{"prompt": "\\ude00\\ud83d"}',
    b'{"prompt": "a", "\\ud800": 1}',
    b'{"prompt": "a", "metadata": {"a": "\\udfff"}}',
    b'{"prompt": "a", "metadata": {"a": [NaN]}}',
    b'{"prompt": "a", "metadata": {"a": 1e999}}',
    b'{"prompt": "a", "max_tokens": 01}',
    b'{"prompt": "a", "max_tokens": 5, "max_tokens": "5"}',
    b'{"prompt": "a", "logit_bias": {"70": 1, "70": NaN}}',
    b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}",
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
            wanted = {"stream": True} | body if streams and isinstance(body, dict) else body
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


def test_val_05_what_is_refused_leaves_no_memory_behind(canary: Canary, http: HttpClient, group: Served) -> None:
    def resident() -> int:
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in group.pids.values()]
        return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("VmRSS"))

    before_kb = resident()
    for _ in range(3):
        for body in (
            {"prompt": "a", "stop": ["x" * 1000] * 900},
            {"prompt": "a", "stop": ["x"] * 10**5},
            {"prompt": "a", "bad_words": ["x" * 900_000]},
            {"prompt": "a", "n": 10**6, "max_tokens": 10**12},
            {"prompt": [70] * 200_000},
            {"prompt": "a", "guided_json": {"enum": ["x" * 900_000]}, "guided_regex": "a"},
        ):
            started_s = time.monotonic()
            assert http.post(TEXT, body).status == 400
            assert time.monotonic() - started_s < 20  # what they ask for would take for ever
        assert http.post(TEXT, b'{"prompt": ' + b"[" * 10**6).status == 400
    assert resident() - before_kb < 50_000
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


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
OK = b'{"prompt":"a","max_tokens":1}'
NO_HTTP: list[tuple[bytes, int]] = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    (b"NONSENSE / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"get / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    # versions
    (b"GET / HTTP/9.9\r\n\r\n", 400),
    (b"GET / HTTP/1.10\r\nHost: x\r\n\r\n", 400),
    (b"GET /live\r\n\r\n", 505),
    # where a body ends: whatever a proxy in front might read in another way
    (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    (POST + b"Content-Length: 29, 29\r\n\r\n" + OK, 400),
    (POST + b"Content-Length : 29\r\n\r\n" + OK, 400),
    *(
        (POST + b"Content-Length: %b\r\n\r\nhello" % length, 400)
        for length in (b"-5", b"+5", b"0x5", b"5 5", b"", b"9" * 20)
    ),
    *(
        (POST + b"Transfer-Encoding: %b\r\n\r\n5\r\nhello\r\n0\r\n\r\n" % coding, 400)
        for coding in (b"identity", b"chunked, gzip", b"xchunked", b"chunked, chunked")
    ),
    *(
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, 400)
        for chunks in (b"-1\r\n", b"f" * 17 + b"\r\n", b"5\nhello\n0\n\n", b"5\r\nhelloXX0\r\n\r\n", b"0x5\r\nhello")
    ),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"t: x\r\n" * 999 + b"\r\n", 431),
    # heads
    (b"GET /live HTTP/1.1\r\n\r\n", 400),
    (b"GET /live HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    *(
        (b"GET /live HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % line, 400)
        for line in (b"a: b\r\n c", b"a: b\0c", b"a b: c", b"Host", b": x", b"a: b\rc: d", b"a:b\nc:d")
    ),
    (b"GET /live HTTP/1.1\nHost: x\n\n", 400),
    (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET /\x01 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % at for at in range(1000)) + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + b"h: x\r\n" * 1000 + b"\r\n", 431),
    (b"GET /live HTTP/1.1\r\nA: " + b"b" * 100_000 + b"\r\n\r\n", 431),
]  # fmt: skip


def test_bytes_that_are_no_http(canary: Canary, http: HttpClient) -> None:
    for data, status in NO_HTTP:
        with http.raw() as connection:
            connection.sendall(data)
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 %d " % status), (data[:80], answer[:300])
        strict_json(answer.partition(b"\r\n\r\n")[2])
    canary.check()


def test_odd_but_right_http_is_understood(canary: Canary, http: HttpClient) -> None:
    chunks = b'5;a=b;c="d"\r\n%b\r\n%x\r\n%b\r\n0\r\nContent-Type: text/plain\r\nX-T: 1\r\n\r\n' % (
        OK[:5],
        len(OK) - 5,
        OK[5:],
    )
    old = b"POST /v1/completions HTTP/1.0\r\nContent-Type: Application/JSON\r\nExpect: 100-continue\r\n"
    for data in (
        POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks,  # a trailer is no header
        old + b"Content-Length: %d\r\n\r\n" % len(OK) + OK,
        b"\r\n\r\nGET http://y/live?a=b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost:\r\nConnection: close\r\nContent-Length: 5\r\nX: \xe9\r\n\r\nhello",
    ):
        with http.raw() as connection:
            connection.sendall(data)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 200 OK"), (data[:80], answer[:300])  # and no 100 to a client of HTTP/1.0
    canary.check()
