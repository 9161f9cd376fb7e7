"""Crash records: what is in one, what redaction leaves of it, and what "the same" means when it is run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from procengine.crash.files import SUFFIX, store_record
from procengine.crash.record import (
    CrashRecord,
    RecordedRequest,
    RecordedTokens,
    decode_record,
    encode_requests,
    recorded_body,
    redacted,
)
from procengine.crash.replay import _compare, _params, _submissions
from procengine.errors import ConfigError
from procengine.sampling_params import SamplingParams
from procengine.structured.spec import StructuredOutputs
from procengine.workflows.generate import GenerateBody


def tokens(*token_ids: int) -> RecordedTokens:
    return RecordedTokens.of(np.array(token_ids, np.int32))


def request(
    key: int = 0, index: int = 0, output: tuple[int, ...] = (1, 2, 3), ended: str = "", **body: Any
) -> RecordedRequest:
    return RecordedRequest(
        key, index, f"r{key - index}", "generate", body, 5, 100 + key, tokens(7, 8), tokens(*output), ended
    )


def test_a_body_is_recorded_without_its_prompt_and_comes_back_as_it_was() -> None:
    params = SamplingParams(temperature=0.5, stop=("a", "b"), logit_bias={3: 1.5}, n=2, max_tokens=None, seed=9)
    body = GenerateBody(prompt="a secret", sampling_params=params, cache_salt="s", priority=3)
    recorded = recorded_body(body)
    assert "prompt" not in recorded and recorded["cache_salt"] == "s" and recorded["priority"] == 3
    data = encode_requests([msgspec.structs.replace(request(), body=recorded)])
    (back,) = msgspec.msgpack.decode(data, type=list[RecordedRequest])
    assert _params(back) == msgspec.structs.replace(params, truncate_prompt_tokens=None)
    assert _params(request(sampling_params={})).seed == 5  # what was drawn


def test_redaction_leaves_lengths_and_what_is_equal_and_nothing_to_read() -> None:
    structured = StructuredOutputs(regex="hidden [a-z]+")
    params = SamplingParams(stop="hidden stop", bad_words=("hidden word",), structured_outputs=structured, top_k=4)
    body = recorded_body(GenerateBody(prompt="x", sampling_params=params, cache_salt="hidden salt"))
    one, two = (msgspec.structs.replace(request(key), body=body) for key in (0, 1))
    other = request(2, output=(1, 2, 4))
    data = encode_requests([one, two, other], b"k" * 32)
    assert b"hidden" not in data and (tokens(1, 2, 3).ids or b"") not in data
    first, second, third = msgspec.msgpack.decode(data, type=list[RecordedRequest])
    assert first.body == second.body and first.output == second.output and first.output.count == 3
    assert first.output.digest != third.output.digest and first.body["sampling_params"]["top_k"] == 4
    assert redacted(one, b"another key").output.digest != first.output.digest
    with pytest.raises(ConfigError, match="redact"):
        first.prompt.to_list()


def test_the_newest_requests_are_kept_when_not_all_fit() -> None:
    requests = [request(key, output=(1,) * 100) for key in range(10)]
    size = len(encode_requests(requests[:1])) - 1
    kept = msgspec.msgpack.decode(encode_requests(requests, max_bytes=3 * size + 8), type=list[RecordedRequest])
    assert [one.key for one in kept] == [7, 8, 9]
    assert msgspec.msgpack.decode(encode_requests([])) == []


@pytest.mark.parametrize(
    ("ended", "now", "is_equal", "said"),
    [
        ("length", [1, 2, 3], True, "3 tokens"),
        ("length", [1, 2], False, "token 2 was 3, is none"),
        ("stop", [1, 2, 3, 4], False, "token 3 was none, is 4"),
        ("stop", [1, 9, 3], False, "token 1 was 2, is 9"),
        ("", [1, 2, 3, 4, 5], True, "3 tokens are the same (running)"),
        ("", [1, 2], False, "token 2 was 3"),
        ("abort", [1, 2, 3, 4], True, "(abort)"),
        ("error", [4, 2, 3], False, "token 0 was 1, is 4"),
    ],
)
def test_what_counts_as_the_same(ended: str, now: list[int], is_equal: bool, said: str) -> None:
    found = _compare(request(ended=ended), now)
    assert found.is_equal is is_equal and said in found.text


def test_choices_of_one_request_are_sent_together_in_the_order_of_acceptance() -> None:
    requests = [request(5, 1), request(4, 0), request(9, 0), request(3, 0), request(6, 2)]
    found = [[(one.key, one.index) for one in choices] for choices in _submissions(requests)]
    assert found == [[(3, 0)], [(4, 0), (5, 1), (6, 2)], [(9, 0)]]


def test_another_version_is_refused_by_its_number() -> None:
    record = CrashRecord(2, "r", "t", 1, 1.0, False, {}, {}, [], {})
    with pytest.raises(ConfigError, match=r"f: a crash record of version 2, this reads 1"):
        decode_record(msgspec.msgpack.encode(record), "f")


def test_the_oldest_files_go_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    for number in range(5):
        path, error = store_record(tmp_path, f"r{number}", b"data", 3)
        assert path is not None and path.read_bytes() == b"data" and not error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", *(f"r{n}{SUFFIX}" for n in (2, 3, 4))]
    assert store_record(tmp_path / "mine.txt", "r", b"", 3) == (None, f"{tmp_path}/mine.txt/r{SUFFIX}: File exists")
