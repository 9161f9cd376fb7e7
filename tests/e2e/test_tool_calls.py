"""Tools asked for through every client of a running group: what comes are calls, in one piece and in deltas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from procengine import LLM, AsyncClient, Client, InvalidRequestError, RequestOutput, SamplingParams, StreamDelta
from procengine.structured.spec import StructuredOutputs
from tests.e2e.running_group import RunningGroup
from tests.e2e.tiny_folders import build_tiny_model, save_folder

USER = {"role": "user", "content": "the weather?"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "tells it", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
# A template of the form that Hugging Face's have: calls of earlier turns with their arguments as objects.
TEMPLATE = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}{{ message.role }}:{{ message.content }}
{%- for call in message.tool_calls or [] %}MARKER{{ call.function.name }}{{ call.function.arguments.city }}{% endfor %}
{%- endfor %}"""
ONE_CALL = {
    "hermes": '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "llama3": '{"name": "now", "parameters": {}}',
    "mistral": "[TOOL_CALLS]now{}",
}
MARKERS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}


def make_folder(folder: Path, marker: str) -> Path:
    """A tiny model whose tokenizer has `marker` as a special token, and whose template writes it."""
    save_folder(build_tiny_model("llama"), folder)
    path = folder / "tokenizer.json"
    facts = json.loads(path.read_text())
    (eos,) = [token["id"] for token in facts["added_tokens"] if token["content"] == "<|end|>"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
    (folder / "generation_config.json").unlink()
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    free_id = max(token["id"] for token in facts["added_tokens"]) + 1
    facts["added_tokens"].append({"id": free_id, "content": marker, **special})
    path.write_text(json.dumps(facts))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARKER", marker))
    return folder


@pytest.fixture(scope="module", params=MARKERS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_folder(tmp_path_factory.mktemp("tools"), MARKERS[request.param])
    with LLM(str(folder), device="cpu", dtype="float32", threads=1, num_blocks=256) as llm:
        assert llm.config.model.tool_call_parser == request.param  # found by itself
        yield llm


@pytest.fixture
def client(llm: LLM) -> Iterator[Client]:
    with Client(llm.config.group.name) as client:
        yield client


def drawn(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=400, **fields)


def check_calls(output: RequestOutput, names: set[str], *, only_one: bool = False) -> None:
    """Every choice is nothing but calls of these functions, with arguments that their schemas allow."""
    for choice in output.outputs:
        assert choice.text == ""
        assert choice.finish_reason == "tool_calls"
        assert choice.tool_calls
        assert len(choice.tool_calls) == 1 or not only_one
        for call in choice.tool_calls:
            assert call.type == "function" and call.function.name in names
            schema = WEATHER if call.function.name == "get_weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call.function.arguments), schema)
    ids = [call.id for choice in output.outputs for call in choice.tool_calls or []]
    assert len(set(ids)) == len(ids)


def added_up(deltas: Sequence[StreamDelta], index: int) -> tuple[str, list[tuple[str | None, str]], str | None]:
    """Text, (name, arguments) of each call, and finish reason of one choice's deltas."""
    mine = [delta for delta in deltas if delta.index == index]
    calls: list[tuple[str | None, str]] = []
    for part in (part for delta in mine for part in delta.tool_calls or []):
        if part.id is not None:
            assert part.index == len(calls)
            calls.append((part.function.name, ""))
        name, arguments = calls[part.index]
        calls[part.index] = (name, arguments + part.function.arguments)
    return "".join(delta.text for delta in mine), calls, mine[-1].finish_reason


def expect_same(deltas: Sequence[StreamDelta], output: RequestOutput) -> None:
    for choice in output.outputs:
        calls = [(call.function.name, call.function.arguments) for call in choice.tool_calls or []]
        assert added_up(deltas, choice.index) == (choice.text, calls, choice.finish_reason)


@pytest.mark.parametrize("seed", range(3))
def test_required_gives_calls_of_any_function(client: Client, seed: int) -> None:
    output = client.chat([USER], drawn(seed, n=2), tools=TOOLS, tool_choice="required")
    check_calls(output, {"get_weather", "now"})
    expect_same(
        list(client.stream(messages=[USER], params=drawn(seed, n=2), tools=TOOLS, tool_choice="required")), output
    )


def test_a_named_function_is_called_once(client: Client) -> None:
    output = client.chat([USER], drawn(1, n=3), tools=TOOLS, tool_choice=NAMED)
    check_calls(output, {"get_weather"}, only_one=True)


def test_arguments_stream_before_the_call_is_whole(client: Client) -> None:
    deltas = list(client.stream(messages=[USER], params=drawn(1), tools=TOOLS, tool_choice=NAMED))
    with_calls = [delta for delta in deltas if delta.tool_calls]
    assert len(with_calls) > 5
    assert with_calls[0].finish_reason is None


def test_a_script_and_an_asyncio_loop_get_the_same(llm: LLM, client: Client) -> None:
    expected = client.chat([USER], drawn(2), tools=TOOLS, tool_choice="required")
    (offline,) = llm.chat([USER], drawn(2), tools=TOOLS, tool_choice="required", use_tqdm=False)
    conversations = llm.chat([[USER], [USER]], drawn(2), tools=TOOLS, tool_choice="required", use_tqdm=False)

    async def ask() -> tuple[RequestOutput, list[StreamDelta]]:
        async with AsyncClient(llm.config.group.name) as client:
            output = await client.chat([USER], drawn(2), tools=TOOLS, tool_choice="required")
            stream = client.stream(messages=[USER], params=drawn(2), tools=TOOLS, tool_choice="required")
            return output, [delta async for delta in stream]

    online, deltas = asyncio.run(ask())
    outputs = [offline, *conversations, online]
    functions = [[call.function for call in output.outputs[0].tool_calls or []] for output in (expected, *outputs)]
    assert all(one == functions[0] for one in functions)
    expect_same(deltas, expected)
    ids = [call.id for output in (expected, *outputs) for call in output.outputs[0].tool_calls or []]
    assert len(set(ids)) == len(ids)  # a conversation may hold calls of several requests


def test_auto_reads_calls_that_come_and_text_that_does_not(llm: LLM, client: Client) -> None:
    style = llm.config.model.tool_call_parser
    for text, content, num_calls in ((f"So: {ONE_CALL[style]}", "So: ", 1), ("No call.", "No call.", 0)):
        params = drawn(1, structured_outputs=StructuredOutputs(choice=(text,)))
        for tool_choice in (None, "auto"):
            output = client.chat([USER], params, tools=TOOLS, tool_choice=tool_choice)
            (choice,) = output.outputs
            assert (choice.text, len(choice.tool_calls or [])) == (content, num_calls)
            assert choice.finish_reason == ("tool_calls" if num_calls else "stop")
            expect_same(list(client.stream(messages=[USER], params=params, tools=TOOLS)), output)
        unread = client.chat([USER], params, tools=TOOLS, tool_choice="none").outputs[0]
        assert (unread.text, unread.tool_calls, unread.finish_reason) == (text, None, "stop")
        assert client.chat([USER], params).outputs[0].text == text


def test_a_marker_that_is_a_special_token_is_read(llm: LLM, client: Client) -> None:
    style = llm.config.model.tool_call_parser
    marker, rest = MARKERS[style], ONE_CALL[style].removeprefix(MARKERS[style])
    facts = json.loads(Path(llm.config.model.tokenizer_path).read_text())
    (special_id,) = [token["id"] for token in facts["added_tokens"] if token["content"] == marker]
    params = drawn(1, structured_outputs=StructuredOutputs(grammar=f"start: <[{special_id}]> {json.dumps(rest)}"))
    (choice,) = client.chat([USER], params, tools=TOOLS).outputs
    assert choice.token_ids[0] == special_id
    assert [call.function.name for call in choice.tool_calls or []] == ["now"]
    assert client.chat([USER], params).outputs[0].text == rest  # without tools, special tokens are left out as always


def test_tools_are_shown_unless_the_choice_is_none(client: Client) -> None:
    shown = {
        choice: len(client.chat([USER], drawn(1, stop="a"), tools=TOOLS, tool_choice=choice).prompt_token_ids)
        for choice in ("auto", "required", "none")
    }
    assert shown["auto"] == shown["required"] > shown["none"] + 100
    assert shown["none"] == len(client.chat([USER], drawn(1, stop="a")).prompt_token_ids)


def test_a_call_and_its_answer_go_back_as_messages(llm: LLM, client: Client) -> None:
    (choice,) = client.chat([USER], drawn(3), tools=TOOLS, tool_choice=NAMED).outputs
    (call,) = choice.tool_calls or []
    turns: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": choice.tool_calls},
        {"role": "tool", "content": "sunny", "tool_call_id": call.id},
    ]
    parsed = [*turns]
    function = {"name": "get_weather", "arguments": json.loads(call.function.arguments)}
    parsed[1] = {"role": "assistant", "content": None, "tool_calls": [{"id": call.id, "function": function}]}
    as_text, as_object = (client.chat(one, drawn(1, stop="a"), tools=TOOLS) for one in (turns, parsed))
    assert as_text.prompt_token_ids == as_object.prompt_token_ids


Ask = Callable[[Client, dict[str, Any]], Any]
ASKS: dict[str, Ask] = {
    "chat": lambda client, asked: client.chat([USER], **asked),
    "stream": lambda client, asked: list(client.stream(messages=[USER], **asked)),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tool_choice": "required"}, "^tool_choice: 'required' needs tools"),
        ({"tools": []}, "^tools: must be a list of at least one function"),
        ({"tools": [{"function": {}}]}, r"^tools\[0\].function.name: "),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "gone"}}}, "^tool_choice: there is no function 'gone'"),
        ({"tools": TOOLS, "params": SamplingParams(detokenize=False)}, "^detokenize: "),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}],
                "tool_choice": "required",
            },
            "^tools: cannot become a grammar of calls: .*Invalid type: x",
        ),
    ],
)
def test_what_is_asked_wrongly_is_an_error(client: Client, ask: Ask, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ask(client, asked)


def test_an_error_of_a_demanded_call_is_one_of_the_tools_everywhere(llm: LLM) -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}]

    async def ask() -> None:
        async with AsyncClient(llm.config.group.name) as client:
            with pytest.raises(InvalidRequestError, match=r"^tools: cannot"):
                await client.chat([USER], tools=tools, tool_choice="required")
            with pytest.raises(InvalidRequestError, match=r"^tools: cannot"):
                _ = [delta async for delta in client.stream(messages=[USER], tools=tools, tool_choice="required")]

    asyncio.run(ask())
    with pytest.raises(InvalidRequestError, match=r"^tools: cannot"):
        llm.chat([USER], tools=tools, tool_choice="required", use_tqdm=False)
    bad_grammar = SamplingParams(structured_outputs=StructuredOutputs(grammar="start: nothing"))
    with pytest.raises(InvalidRequestError, match=r"^grammar: "):
        llm.chat([USER], bad_grammar, tools=tools, use_tqdm=False)


def test_a_prompt_that_may_show_calls_is_not_read(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match=r"^echo: "):
        next(client.stream(messages=[USER], tools=TOOLS, echo=True))


@pytest.mark.model
def test_the_real_model_can_be_made_to_call(smollm2_gguf: Path) -> None:
    """Its template shows no tools, so the style must be said."""
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 768, "num_blocks": 128}
    with RunningGroup(smollm2_gguf, **options, tool_call_parser="hermes") as group:
        params = SamplingParams(temperature=0.0, max_tokens=80)
        messages = [{"role": "user", "content": "What is the weather in Paris for 2 days? Call get_weather."}]
        output = group.client.chat(messages, params, tools=TOOLS, tool_choice=NAMED)
        check_calls(output, {"get_weather"}, only_one=True)
        expect_same(list(group.client.stream(messages=messages, params=params, tools=TOOLS, tool_choice=NAMED)), output)
        assert group.client.chat(messages, params, tools=TOOLS).outputs[0].tool_calls == []
    with RunningGroup(smollm2_gguf, **options) as group, pytest.raises(InvalidRequestError, match="--tool-call-parser"):
        group.client.chat(messages, params, tools=TOOLS, tool_choice="required")
