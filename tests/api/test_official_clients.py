"""The clients that people have, unmodified: `openai` and `anthropic`, against the mock device."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.api.http_client import HttpClient
from tests.procs.harness import Served, as_ids

TURNS: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(group: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{group.ready['http']}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(group: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=group.ready["http"], api_key="none", max_retries=0) as made:
        yield made


def test_chat_whole_and_streamed(client: openai.OpenAI, group: Served) -> None:
    model = group.ready["model"]
    answer = client.chat.completions.create(
        model=model, messages=TURNS, max_tokens=6, n=2, logprobs=True, top_logprobs=2, extra_body={"top_k": 3}
    )
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.choices[0].logprobs is not None and len(answer.choices[0].logprobs.content or ()) == 6
    stream = client.chat.completions.create(
        model=model, messages=TURNS, max_tokens=6, stream=True, stream_options={"include_usage": True}
    )
    *events, last = list(stream)
    assert "".join(event.choices[0].delta.content or "" for event in events)
    assert events[-1].choices[0].finish_reason == "length"
    assert last.usage is not None and last.usage.completion_tokens == 6


def test_completions_models_and_embeddings(client: openai.OpenAI, group: Served) -> None:
    model = group.ready["model"]
    answer = client.completions.create(model=model, prompt=[as_ids(3), as_ids(4)], max_tokens=3, logprobs=1, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is not None
    assert client.models.list().data[0].id == client.models.retrieve(model).id == model
    texts = ["one text", "another", "one text"]
    vectors = [one.embedding for one in client.embeddings.create(model=model, input=texts).data]  # base64 underneath
    floats = client.embeddings.create(model=model, input=texts, encoding_format="float").data
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(vectors[0], floats[0].embedding, strict=True))
    assert vectors[0] == vectors[2] and [one.index for one in floats] == [0, 1, 2]


def test_responses_whole_and_streamed(client: openai.OpenAI, group: Served) -> None:
    model = group.ready["model"]
    answer = client.responses.create(model=model, input="hi", instructions="be brief", max_output_tokens=5)
    assert answer.status == "incomplete" and answer.output_text
    assert answer.usage is not None and answer.usage.output_tokens == 5
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
    ]
    with client.responses.stream(model=model, input=history, max_output_tokens=5) as stream:
        events = list(stream)
    kinds, last = [event.type for event in events], events[-1]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert last.type == "response.incomplete" and last.response.output_text and last.response.status == "incomplete"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=model, input="hi", previous_response_id="resp_1")


def test_errors_are_those_that_clients_know(client: openai.OpenAI, group: Served) -> None:
    model = group.ready["model"]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=TURNS, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=TURNS)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt=as_ids(2047), max_tokens=2)
    assert long.value.code == "context_length_exceeded"


def test_many_at_once(group: Served) -> None:
    async def run() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{group.ready['http']}/v1", api_key="none") as made:

            async def one(count: int) -> int:
                stream = await made.chat.completions.create(
                    model=group.ready["model"], messages=TURNS, max_tokens=count, stream=True,
                    stream_options={"include_usage": True},
                )  # fmt: skip
                events = [event async for event in stream]
                assert events[-1].usage is not None
                return events[-1].usage.completion_tokens

            return list(await asyncio.gather(*map(one, range(1, 33))))

    assert asyncio.run(run()) == list(range(1, 33))


def test_messages_whole_and_streamed(claude: anthropic.Anthropic, group: Served) -> None:
    model = group.ready["model"]
    answer = claude.messages.create(model=model, max_tokens=5, messages=TURNS, system="be brief")
    assert (answer.stop_reason, answer.usage.output_tokens, answer.content[0].type) == ("max_tokens", 5, "text")
    history: Any = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "7"}]},
    ]
    with claude.messages.stream(model=model, max_tokens=5, messages=history) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text and final.stop_reason == "max_tokens" and final.usage.output_tokens == 5
    count = claude.messages.count_tokens(model=model, messages=TURNS).input_tokens
    usage = claude.messages.create(model=model, max_tokens=1, messages=TURNS).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        claude.messages.create(model=model, max_tokens=5, messages=TURNS, extra_body={"top_p": 7})
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=TURNS)


def test_scores_and_rankings_are_cosines_of_the_vectors(http: HttpClient) -> None:
    texts = ["one", "two", "three"]
    vectors = [one["embedding"] for one in http.post("/v1/embeddings", {"input": texts}).json["data"]]

    def cosine(a: int, b: int) -> float:
        product: float = sum(x * y for x, y in zip(vectors[a], vectors[b], strict=True))
        return product / float(math.hypot(*vectors[a]) * math.hypot(*vectors[b]))

    found = http.post("/v1/score", {"text_1": "one", "text_2": ["two", "three"]}).json
    expected = [pytest.approx(cosine(0, at), abs=1e-5) for at in (1, 2)]
    assert [one["score"] for one in found["data"]] == expected and found["usage"]["prompt_tokens"] > 0
    ranked = http.post("/v1/rerank", {"query": "one", "documents": ["two", {"text": "three"}, "one"], "top_n": 2}).json
    scores = [cosine(0, 1), cosine(0, 2), 1.0]
    found = [one["relevance_score"] for one in ranked["results"]]
    assert found == pytest.approx(sorted(scores, reverse=True)[:2], abs=1e-5)
    for one in ranked["results"]:
        assert one["document"]["text"] == ("two", "three", "one")[one["index"]]
    for path, body, param in (
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/embeddings", {"input": [[]]}, "input[0]"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ):
        answer = http.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, param), json.dumps(body)
