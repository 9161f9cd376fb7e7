"""ChatTemplate against transformers' apply_chat_template, and the shape of `messages`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from procengine.chat_template import ChatTemplate
from procengine.errors import InvalidRequestError, ModelError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS_AND_LOOPS = """
{{- bos_token }}
{%- if tools %}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set seen = namespace(users=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- if message.role == 'user' %}{% set seen.users = seen.users + 1 %}{% endif %}
  {% generation %}
  [{{ message.role }}] {{ message.content | trim }}{{ message.name | default('-') }}
  {% endgeneration %}
{%- endfor %}
{{ seen.users }}{{ eos_token }}
{% if add_generation_prompt %}[assistant]{% endif %}
"""
USER = {"role": "user", "content": "What is the capital of France?"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "é <b> & 日本 'q'", "parameters": {"b": 1, "a": None}},
    }
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": " Be brief. "}, USER, {"role": "assistant", "content": "Paris."}, USER],
    [
        USER,
        {"role": "skip", "content": "x"},
        {"role": "user", "content": "<b>é</b>\n", "name": None},
        {"role": "stop", "content": ""},
    ],
    [{"role": "user", "content": "{{ 7 * 7 }} {% raw %}", "name": "Ann"}],
]


@pytest.mark.parametrize("source", [CHATML, TOOLS_AND_LOOPS])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    # As apply_chat_template does: keys that are null are not passed on.
    turns = [{key: value for key, value in message.items() if value is not None} for message in messages]
    expected, _ = render_jinja_template(
        conversations=[turns],
        tools=tools,
        chat_template=source,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert ChatTemplate(source, "<s>", "</s>").render(messages, prompt, tools) == expected[0]


def test_text_of_a_message_is_never_evaluated() -> None:
    assert "{{ 7 * 7 }}" in ChatTemplate(CHATML).render([{"role": "user", "content": "{{ 7 * 7 }}"}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must not be empty"),
        ("hello", "messages must be a list, not str"),
        ({"role": "user"}, "messages must be a list, not dict"),
        (None, "messages must be a list, not NoneType"),
        (["hello"], r"messages\[0\] must be an object, not str"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role is missing"),
        ([USER, {"role": 3, "content": "x"}], r"messages\[1\]\.role must be a string, not int"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content must be a string, not NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content must be a string, not list"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages: a object is not JSON"),
    ],
)
def test_wrong_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ChatTemplate(CHATML).render(messages)


def test_a_turn_that_only_calls_tools_needs_no_content() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content is defined }};{% endfor %}"
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert ChatTemplate(source).render(messages) == "user:True;assistant:False;"


def call_with(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("arguments", ['{"city": "é", "n": [1]}', {"city": "é", "n": [1]}], ids=["text", "object"])
def test_templates_see_the_arguments_of_a_call_as_an_object(arguments: Any) -> None:
    source = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    assert ChatTemplate(source).render([USER, call_with(arguments)]) == '{"city": "é", "n": [1]}'


def test_empty_arguments_are_those_of_a_function_without_any() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert ChatTemplate(source).render([call_with("")]) == "{}"


@pytest.mark.parametrize("arguments", ['{"city": ', "[1]", "7", "text", '{"a":' * 100_000])
def test_arguments_that_are_no_object_are_named(arguments: str) -> None:
    with pytest.raises(
        InvalidRequestError,
        match=r"^messages\[1\]\.tool_calls\[0\]\.function\.arguments: must be the JSON text of an object",
    ):
        ChatTemplate(CHATML).render([USER, call_with(arguments)])


@pytest.mark.parametrize("calls", ["x", 7, {"a": 1}, [7], [{}], [{"function": None}], [{"function": {"name": "f"}}]])
def test_calls_of_another_shape_are_the_templates_business(calls: Any) -> None:
    source = "{{ messages[0].tool_calls | tojson }}"
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert json.loads(ChatTemplate(source).render([message])) == calls


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10000000) | length }}", "Range too big"),
    ],
)
def test_what_a_template_refuses_is_an_invalid_request(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"messages: .*{reason}"):
        ChatTemplate(source).render([USER])


def test_broken_template_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("ok\n{% for %}")


def test_strftime_now() -> None:
    assert re.fullmatch(r"\d{4}-\d\d", ChatTemplate("{{ strftime_now('%Y-%m') }}").render([USER]))


@pytest.mark.model
def test_p5_of_the_real_model_has_37_tokens(smollm2_gguf: Path, tmp_path: Path) -> None:
    from procengine.model_source import resolve_model
    from procengine.tokenizer import Tokenizer

    model = resolve_model(str(smollm2_gguf), tmp_path)
    assert model.chat_template is not None
    prompt = ChatTemplate(model.chat_template, model.chat_bos_token, model.chat_eos_token).render([USER])
    ids = Tokenizer.load(model.tokenizer_path).encode(prompt, add_special_tokens=False)
    assert len(ids) == 37
    assert ids[0] == 1 and ids.count(2) == 2  # <|im_start|> first; one <|im_end|> a turn
