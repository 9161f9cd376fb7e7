"""Chat and text completions over HTTP, on the mock device: what is answered is what the group generated."""

from __future__ import annotations

from typing import Any

import pytest

from procengine import SamplingParams
from tests.api.http_client import HttpClient
from tests.procs.harness import Served, as_ids

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": as_ids(7), "max_tokens": 5, **fields}


def joined(events: list[Any], index: int = 0) -> str:
    """The text of a choice."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def finish_reasons(events: list[Any]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["finish_reason"] is not None:
                found.setdefault(choice["index"], []).append(choice["finish_reason"])
    return found


def test_answer_is_what_the_group_says_of_the_same_prompt(group: Served, http: HttpClient) -> None:
    answer = http.post(TEXT, text(return_token_ids=True)).json
    (choice,) = answer["choices"]
    with (
        group.client() as client
    ):  # the mock's tokens follow from the request's key: only their decoding can be compared
        assert len(choice["token_ids"]) == 5 and choice["prompt_token_ids"] == as_ids(7)
        echoed = client.generate(choice["token_ids"], SamplingParams(max_tokens=1, ignore_eos=True), echo=True)
    assert echoed.outputs[0].text.startswith(choice["text"])
    assert (answer["object"], answer["model"]) == ("text_completion", group.ready["model"])
    assert (choice["finish_reason"], choice["index"]) == ("length", 0)
    assert answer["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": None,
    }


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, text())])
def test_stream_has_one_role_one_end_and_whole_chunks(http: HttpClient, path: str, body: dict[str, Any]) -> None:
    events = http.events(path, body | {"return_token_ids": True})
    assert finish_reasons(events) == {0: ["length"]}
    choices = [event["choices"][0] for event in events]
    roles = [choice["delta"]["role"] for choice in choices if "role" in choice.get("delta", {})]
    assert roles == (["assistant"] if path == CHAT else [])
    assert sum(len(choice.get("token_ids", ())) for choice in choices) == 5
    assert joined(events) and len({event["id"] for event in events}) == 1
    assert not any("usage" in event for event in events)


def test_plain_events_and_those_that_say_more_hold_the_same_text(http: HttpClient) -> None:
    events = http.events(CHAT, chat(max_tokens=40, messages=[{"role": "user", "content": "a \u2028 \u00fc"}]))
    assert all(choice["delta"].get("content") for event in events[1:-1] for choice in event["choices"])
    assert all(set(event) == {"id", "object", "created", "model", "choices"} for event in events)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 2])
def test_api_01_usage_comes_once_behind_the_last_choice_and_only_if_asked_for(
    http: HttpClient, path: str, n: int
) -> None:
    body = chat(n=n) if path == CHAT else text(n=n)
    for options in ({}, {"include_usage": False}, {"include_obfuscation": True}):
        assert not any(event.get("usage") for event in http.events(path, body | {"stream_options": options}))
    *events, last = http.events(path, body | {"stream_options": {"include_usage": True}})
    assert not any(event.get("usage") for event in events)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["completion_tokens"] == 5 * n and usage["total_tokens"] == 5 * n + usage["prompt_tokens"]
    refused = http.post(path, body | {"stream_options": {"include_usage": True}})
    assert (refused.status, refused.error["param"]) == (400, "stream_options")


def test_continuous_usage_counts_up(http: HttpClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = http.events(TEXT, text(stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 5 and counts[0] >= 1


def test_choices_of_a_batch_are_numbered_prompt_by_prompt(http: HttpClient) -> None:
    body = text(prompt=[as_ids(3, 1), as_ids(4, 2), as_ids(5, 3)], n=2, return_token_ids=True)
    answer = http.post(TEXT, body).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [len(choice["prompt_token_ids"]) for choice in answer["choices"]] == [3, 3, 4, 4, 5, 5]
    assert answer["usage"]["prompt_tokens"] == 12 and answer["usage"]["completion_tokens"] == 30
    events = http.events(TEXT, body)
    assert finish_reasons(events) == {index: ["length"] for index in range(6)}


def test_usage_says_how_much_of_the_prompt_was_cached(http: HttpClient) -> None:
    body = text(prompt=as_ids(64, 77), n=2)
    cached = [http.post(TEXT, body).json["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 48]


def test_echo_begins_with_the_prompt(http: HttpClient) -> None:
    body = text(prompt="Hello there", echo=True)
    assert http.post(TEXT, body).json["choices"][0]["text"].startswith("Hello there")
    assert joined(http.events(TEXT, body)).startswith("Hello there")


def test_parts_of_a_content_and_developers_are_understood(http: HttpClient) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "x"}, {"role": "user", "content": "a\nb"}]
    ids = [http.post("/tokenize", {"messages": each}).json["tokens"] for each in (messages, plain)]
    assert ids[0] == ids[1]
    assert http.post(CHAT, chat(messages=messages)).json["usage"]["prompt_tokens"] == len(ids[0])
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    refused = http.post(CHAT, chat(messages=image))
    assert (refused.status, refused.error["param"]) == (400, "messages[0].content[0].type")


def test_tokens_go_to_text_and_back(http: HttpClient) -> None:
    ids = http.post("/tokenize", {"prompt": "Grüße"}).json
    assert ids["count"] == len(ids["tokens"])
    assert http.post("/detokenize", {"tokens": ids["tokens"]}).json == {"prompt": "Grüße"}


def test_seeds_priorities_and_other_extras_are_taken(http: HttpClient) -> None:
    extras = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [100],
        "ignore_eos": True,
        "min_tokens": 2,
        "bad_words": ["x"],
        "logit_bias": {"70": 1.5},
        "skip_special_tokens": False,
        "priority": 3,
        "cache_salt": "s",
        "seed": -5,
        "user": "u",
        "metadata": {"a": "b"},
        "stop": None,
    }
    for path, body in ((CHAT, chat(**extras, max_completion_tokens=3)), (TEXT, text(**extras))):
        answer = http.post(path, body)
        assert answer.status == 200, answer.body


def test_events_of_a_slow_reader_are_all_there(http: HttpClient) -> None:
    # Far more than the sockets take: what waits is sent when there is room.
    with http.opened(CHAT, chat(max_tokens=1900, n=8, stream=True, logprobs=True, top_logprobs=5)) as response:
        first = response.read(100)
        while len(first) < 1000:
            first += response.read(100)
        rest = response.read()
    events = (first + rest).decode().split("\n\n")
    assert events[-2] == "data: [DONE]"
    assert sum('"finish_reason":"length"' in event for event in events) == 8
