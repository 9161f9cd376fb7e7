"""What counts as a prompt, and errors that name the field which cannot be sent."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from procengine.client_bodies import (
    conversations,
    encode_body,
    final_body,
    generate_body,
    messages_body,
    num_choices,
    one_params_each,
    one_prompt_body,
    prompt_body,
    prompt_list,
)
from procengine.errors import InvalidRequestError
from procengine.sampling_params import SamplingParams
from procengine.structured.spec import StructuredOutputs
from procengine.tool_calls import FunctionCall, ToolCall
from procengine.workflows.embed import EmbedBody
from procengine.workflows.generate import GenerateBody

NESTED: list[Any] = []
for _ in range(100_000):
    NESTED = [NESTED]


def with_params(**fields: Any) -> dict[str, Any]:
    return generate_body({"prompt": "x"}, SamplingParams(**fields))


@pytest.mark.parametrize(
    ("given", "prompts", "is_list"),
    [
        ("text", ["text"], False),
        ([1, 2], [[1, 2]], False),
        ((1, 2), [(1, 2)], False),
        ({"prompt": "text"}, [{"prompt": "text"}], False),
        (["a", "b"], ["a", "b"], True),
        ([[1], [2]], [[1], [2]], True),
        (["a", [1]], ["a", [1]], True),
        ([], [], True),
    ],
)
def test_one_prompt_or_a_list_of_them(given: Any, prompts: list[Any], is_list: bool) -> None:
    assert prompt_list(given) == (prompts, is_list)


def test_numpy_ids_are_one_prompt() -> None:
    prompts, is_list = prompt_list(np.array([1, 2], np.int32))  # type: ignore[arg-type]
    assert (len(prompts), is_list) == (1, False)
    assert encode_body(prompt_body(prompts[0])) == encode_body({"prompt_token_ids": [1, 2]})


def test_one_conversation_or_a_list_of_them() -> None:
    one = [{"role": "user", "content": "hi"}]
    assert conversations(one) == ([one], False)
    assert conversations([one, one]) == ([one, one], True)


def test_sampling_params_are_shared_or_one_each() -> None:
    a, b = SamplingParams(seed=1), SamplingParams(seed=2)
    assert list(one_params_each(None, 2)) == [None, None]
    assert list(one_params_each(a, 2)) == [a, a]
    assert list(one_params_each([a, b], 2)) == [a, b]
    with pytest.raises(InvalidRequestError, match="sampling_params: 2 were given for 3 prompts"):
        one_params_each([a, b], 3)


def test_prompt_or_messages_but_not_both() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert one_prompt_body("x", None) == {"prompt": "x"}
    assert one_prompt_body(None, messages) == {"messages": messages}
    for given in ((None, None), ("x", messages)):
        with pytest.raises(InvalidRequestError, match="exactly one of prompt and messages"):
            one_prompt_body(*given)


def test_generate_body_is_what_the_frontend_reads() -> None:
    params = SamplingParams(temperature=0.5, stop=("a",), logprobs=2)
    data = encode_body(generate_body(prompt_body([1, 2]), params, 3, "salt", echo=True))
    assert msgspec.msgpack.decode(data, type=GenerateBody) == GenerateBody(
        prompt_token_ids=[1, 2], sampling_params=params, priority=3, cache_salt="salt", echo=True
    )


def test_every_sampling_parameter_reaches_the_frontend() -> None:
    params = SamplingParams(
        n=2,
        presence_penalty=0.5,
        bad_words=("a",),
        logit_bias={7: -1.5},
        allowed_token_ids=(7, 8),
        min_tokens=2,
        prompt_logprobs=0,
        structured_outputs=StructuredOutputs(json_schema={"type": "object"}),
        output_kind="cumulative",
    )
    data = encode_body(generate_body(prompt_body("x"), params))
    assert msgspec.msgpack.decode(data, type=GenerateBody).sampling_params == params


def test_tools_go_with_messages_only() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
    for body in (messages_body(messages, tools), one_prompt_body(None, messages, tools)):
        decoded = msgspec.msgpack.decode(encode_body(generate_body(body, None)), type=GenerateBody)
        assert decoded == GenerateBody(messages=messages, tools=tools)
    with pytest.raises(InvalidRequestError, match="tools: can only be given with messages"):
        one_prompt_body("x", None, tools)


@pytest.mark.parametrize("prompt", [None, 7, 1.5, True, b"abc", bytearray(b"abc"), object()])
def test_what_is_neither_text_nor_ids_is_refused(prompt: Any) -> None:
    second = prompt_list(["fine", prompt])[0][1]
    for make, value in ((prompt_list, prompt), (prompt_body, prompt), (prompt_body, second)):
        with pytest.raises(InvalidRequestError, match=r"^prompt: must be a text or a list of token ids, got "):
            make(value)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hi", "messages: must be a list of objects, got 'hi'"),
        ({"role": "user"}, "messages: must be a list of objects, got {'role': 'user'}"),
        (None, "messages: must be a list of objects, got None"),
        ([{"role": "user"}, "hi"], r"messages\[1\]: must be an object, got 'hi'"),
    ],
)
def test_messages_that_are_no_list_of_objects_are_refused(messages: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{reason}"):
        messages_body(messages)


def test_calls_that_came_can_be_sent_back() -> None:
    call = ToolCall("call_1", FunctionCall("f", "{}"))
    body = messages_body([{"role": "assistant", "content": None, "tool_calls": [call]}])
    decoded = msgspec.msgpack.decode(encode_body(generate_body(body, None)), type=GenerateBody)
    assert decoded.messages == [{"role": "assistant", "content": None, "tool_calls": [msgspec.to_builtins(call)]}]


def test_who_waits_for_the_end_asks_for_one_message_a_choice() -> None:
    params = SamplingParams(n=3, seed=5, output_kind="cumulative")
    body = generate_body(prompt_body("x"), params, echo=True)
    final = final_body(body)
    assert final == body | {"sampling_params": msgspec.structs.replace(params, output_kind="final")}
    assert final_body(final) is final
    assert body["sampling_params"] is params  # the caller's own is as it was
    assert final_body({"prompt": "x"}) == {"prompt": "x"}


def test_a_request_has_as_many_ends_as_choices() -> None:
    assert num_choices(generate_body({"prompt": "x"}, SamplingParams(n=4))) == 4
    assert num_choices(generate_body({"prompt": "x"}, None)) == 1
    assert num_choices({"prompt": "x"}) == 1


def test_embed_and_message_bodies_are_what_the_frontend_reads() -> None:
    assert msgspec.msgpack.decode(encode_body(prompt_body("x")), type=EmbedBody) == EmbedBody(prompt="x")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    assert msgspec.msgpack.decode(encode_body(messages_body(messages)), type=EmbedBody) == EmbedBody(messages=messages)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a\ud800"}, "prompt: character 1 is a lone surrogate"),
        ({"messages": [{"content": "\udfff"}]}, "messages: character 0 is a lone surrogate"),
        ({"prompt_token_ids": [1, 2**64]}, "prompt_token_ids: holds an integer that does not fit into 64 bits"),
        ({"prompt": "x", "messages": [{"content": object()}]}, "messages: holds a value that cannot be sent"),
        ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt: character 0"),
        (with_params(stop=("ok", "a\ud800")), "sampling_params.stop: character 1 is a lone surrogate"),
        (with_params(bad_words=("\udc00",)), "sampling_params.bad_words: character 0 is a lone surrogate"),
        (with_params(n=2**64), "sampling_params.n: holds an integer that does not fit into 64 bits"),
        (with_params(logit_bias={2**70: 1.0}), "sampling_params.logit_bias: holds an integer"),
        (
            with_params(structured_outputs=StructuredOutputs(choice=("\ud800",))),
            "sampling_params.structured_outputs.choice: character 0 is a lone surrogate",
        ),
        (
            with_params(structured_outputs=StructuredOutputs(json_schema={"maximum": 2**64})),
            "sampling_params.structured_outputs.json_schema: holds an integer",
        ),
        ({"messages": [{"content": NESTED}]}, "messages: nests too deep"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_sent_is_named(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        encode_body(body)


def test_ids_that_are_no_integers_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prompt_token_ids: must be a list of integers"):
        prompt_body([1, 2.5])  # type: ignore[list-item]
