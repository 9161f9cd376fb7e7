"""SmolLM2 over HTTP: the cases of text, stops, sampling and tools, whole and streamed alike."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.http_client import HttpClient
from tests.client_homes import node_folder

pytestmark = pytest.mark.model

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
P1, P2, P3 = "The capital of France is", "Here is the English alphabet: ABC", "日本語" * 4
P5: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}


@pytest.fixture
def http(smollm2_http: HttpClient) -> HttpClient:
    return smollm2_http


def both(http: HttpClient, path: str, **fields: Any) -> tuple[str, str]:
    """Text and finish reason, whole; the stream says the same."""
    body = {"temperature": 0, **fields}
    (choice,) = http.post(path, body).json["choices"]
    whole = choice["text"] if path == TEXT else choice["message"]["content"]
    choices = [event["choices"][0] for event in http.events(path, body)]
    pieces = [one["text"] if path == TEXT else one["delta"].get("content", "") for one in choices]
    assert "".join(pieces) == whole and choices[-1]["finish_reason"] == choice["finish_reason"]
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    return whole, choice["finish_reason"]


def test_det_characters_stops_and_spaces(http: HttpClient) -> None:
    for prompt, fields, expected in (
        (P1, {"max_tokens": 1}, (" Paris", "length")),  # DET-05
        (P1, {"max_tokens": 4}, (" Paris.\n\n", "length")),
        (P3, {"max_tokens": 12}, ("日本語日本語", "length")),  # DET-01
        (P3, {"max_tokens": 2}, ("日", "length")),  # DET-03
        (P3, {"max_tokens": 3}, ("日本", "length")),
        (P2, {"max_tokens": 12, "stop": ["DEFGHIJ"]}, ("", "stop")),  # DET-07
        (P2, {"max_tokens": 12, "stop": ["FGHI"]}, ("DE", "stop")),  # DET-08
        (P2, {"max_tokens": 12, "stop": ["GHIJ"]}, ("DEF", "stop")),
        (P2, {"max_tokens": 12, "stop": "E"}, ("D", "stop")),  # DET-10
        (P2, {"max_tokens": 12, "stop": ["E"], "include_stop_str_in_output": True}, ("DE", "stop")),
        (P2, {"max_tokens": 12, "stop": ["E"], "min_tokens": 4}, ("DEFGHIJKLMNOPQRSTUVW", "length")),  # DET-11
    ):
        assert both(http, TEXT, prompt=prompt, **fields) == expected, (prompt, fields)
    assert both(http, CHAT, messages=P5, max_tokens=30) == ("The capital of France is Paris.", "stop")


def test_smp_temperatures_filters_choices(http: HttpClient) -> None:
    greedy = both(http, TEXT, prompt=P2, max_tokens=12)[0]
    for temperature in (1e-2, 1e-4, 1e-6, 1e-38, 0):  # SMP-02
        assert both(http, TEXT, prompt=P2, max_tokens=12, temperature=temperature)[0] == greedy
    texts = {  # SMP-03
        top_k: both(http, TEXT, prompt=P1, max_tokens=6, temperature=1, seed=7, top_k=top_k)[0]
        for top_k in (-1, 0, 49151, 49152, 49153, 9999999)
    }
    assert len(set(texts.values())) == 1
    assert both(http, TEXT, prompt=P1, max_tokens=2, logit_bias={"49151": 100})[1] == "length"  # SMP-06
    body = {"prompt": P1, "temperature": 1.2, "max_tokens": 8, "n": 5, "seed": 3}  # SMP-10
    sets = [[one["text"] for one in http.post(TEXT, body).json["choices"]] for _ in range(2)]
    assert sets[0] == sets[1] and len(set(sets[0])) > 1


def test_smp_12_logprobs_of_zero_are_not_off(http: HttpClient) -> None:
    body = {"prompt": P1, "max_tokens": 1, "temperature": 0}
    for k, num_top in ((0, 0), (5, 5)):
        (choice,) = http.post(TEXT, body | {"logprobs": k}).json["choices"]
        assert choice["logprobs"]["token_logprobs"] == [pytest.approx(-0.2606, abs=0.01)]
        assert len(choice["logprobs"]["top_logprobs"][0]) == num_top
    assert http.post(TEXT, body | {"logprobs": None}).json["choices"][0]["logprobs"] is None
    chat = {"messages": P5, "max_tokens": 2, "temperature": 0}
    for fields, is_on in (
        ({"logprobs": True}, True),
        ({"logprobs": True, "top_logprobs": 0}, True),
        ({"logprobs": True, "top_logprobs": None}, True),
        ({"logprobs": False}, False),
        ({}, False),
    ):
        logprobs = http.post(CHAT, chat | fields).json["choices"][0]["logprobs"]
        assert (logprobs is not None) == is_on
        if is_on:
            assert [one["top_logprobs"] for one in logprobs["content"]] == [[], []]


def test_structured_answers_and_calls_through_the_official_client(http: HttpClient) -> None:
    with openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as client:
        schema: Any = {
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": {"type": "object", "properties": {"city": {"enum": ["Paris"]}},
                                                       "required": ["city"], "additionalProperties": False}},
        }  # fmt: skip
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id, messages=P5, temperature=0, response_format=schema, max_tokens=60
        )
        assert json.loads(answer.choices[0].message.content or "") == {"city": "Paris"}
        asked: Any = {
            "model": answer.model, "messages": P5, "temperature": 0, "tools": [WEATHER], "max_tokens": 80,
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        }  # fmt: skip
        message = client.chat.completions.create(**asked).choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function" and call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        names, arguments, finish = [], "", None
        for event in client.chat.completions.create(**asked, stream=True):
            for piece in event.choices[0].delta.tool_calls or ():
                assert piece.index == 0 and piece.function is not None
                names += [piece.function.name] if piece.function.name else []
                arguments += piece.function.arguments or ""
            finish = event.choices[0].finish_reason or finish
        assert (names, arguments, finish) == (["get_weather"], call.function.arguments, "tool_calls")


def test_calls_in_the_other_shapes(http: HttpClient) -> None:
    function = WEATHER["function"]
    body = {
        "input": "Weather in Paris?", "tools": [{"type": "function", **function}], "tool_choice": "required",
        "max_output_tokens": 80, "temperature": 0,
    }  # fmt: skip
    answer = http.post("/v1/responses", body).json
    item = answer["output"][0]
    assert (item["type"], item["name"]) == ("function_call", "get_weather") and json.loads(item["arguments"])
    claude = {
        "messages": P5, "max_tokens": 80, "temperature": 0,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "tools": [{"name": "get_weather", "input_schema": function["parameters"]}],
    }  # fmt: skip
    message = http.post("/v1/messages", claude).json
    block = message["content"][0]
    assert (block["type"], block["name"], message["stop_reason"]) == ("tool_use", "get_weather", "tool_use")
    with http.opened("/v1/messages", claude | {"stream": True}) as response:
        text = response.read().decode()
    data = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    of_first = [one["delta"] for one in data if "delta" in one and one.get("index") == 0]
    pieces = [delta["partial_json"] for delta in of_first]
    assert json.loads("".join(pieces)) == block["input"]
    assert [one["type"] for one in data][-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_openai_client_of_node(http: HttpClient, tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "clients" / "openai_node.mjs"
    folder = node_folder(tmp_path / "node", script)
    (model,) = (one["id"] for one in http.get("/v1/models").json["data"])
    env = {**os.environ, "OPENAI_BASE_URL": f"{http.url}/v1", "MODEL": model}
    said = json.loads(
        subprocess.run(["node", folder / script.name], env=env, stdout=subprocess.PIPE, check=True).stdout
    )
    assert said["text"] == said["response"] == "The capital of France is Paris." and said["models"] == [model]
    assert said["usage"]["completion_tokens"] == 8 and said["refused"] == {"status": 400, "param": "temperature"}
    assert set(said["person"]) == {"name", "age"} and "Lovelace" in said["person"]["name"]
    assert said["call"]["name"] == "get_weather" and json.loads(said["call"]["arguments"]) == {"city": "Paris"}
