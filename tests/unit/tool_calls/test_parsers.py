"""What each style makes of a text, whole and in pieces."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from procengine.errors import ConfigError
from procengine.tool_calls import (
    STYLES,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
    parse,
    tool_call_parser,
)

ARGUMENTS = '{"city": "Pa\\"ris}", "n": [1, {"x": "]"}], "s": "日本\\u00e9 👩"}'
TRICKY = [ARGUMENTS, "{}", "{ }", '{"a": {"b": {"c": [[], {}, "{"]}}}', '{"code": "if (x) { return \\"}\\"; }\\n"}']

Case = tuple[str, str, str, list[tuple[str, str]]]  # style, text, content, (name, arguments) of each call

GOOD: list[Case] = [
    ("hermes", "Just text.", "Just text.", []),
    ("hermes", "", "", []),
    *(("hermes", f'<tool_call>\n{{"name": "f", "arguments": {a}}}\n</tool_call>', "", [("f", a)]) for a in TRICKY),
    (
        "hermes",
        'Let me see.\n<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>\n<tool_call>\n{"name":"g","arguments":{}}'
        "\n</tool_call>\n",
        "Let me see.\n",
        [("f", '{"a":1}'), ("g", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nDone.', "\n\nDone.", [("f", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1]}')]),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "parameters": {}, "x": [null]}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "caf\\u00e9_日", "arguments": {}}</tool_call>', "", [("café_日", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_c', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g"}', "", [("f", "{}"), ("g", "{}")]),
    ("llama3", f' \n{{"name": "f", "parameters": {ARGUMENTS}}}', "", [("f", ARGUMENTS)]),
    ("llama3", f'<|python_tag|>{{"name": "f", "parameters": {ARGUMENTS}}}', "", [("f", ARGUMENTS)]),
    ("llama3", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        "llama3",
        '{"name": "f", "parameters": {"a": "; {"}}; {"name": "g", "arguments": {}} ;{"name": "h", "parameters": {}}\n',
        "",
        [("f", '{"a": "; {"}'), ("g", "{}"), ("h", "{}")],
    ),
    ("llama3", 'I call:<|python_tag|> {"name": "f", "parameters": {}}', "I call:", [("f", "{}")]),
    ("llama3", '{"name": "f", "parameters": {}} and so on', " and so on", [("f", "{}")]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}]', "", [("f", ARGUMENTS)]),
    (
        "mistral",
        'Hm.[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}, "id": "abc123def"}, '
        '{"arguments": {}, "name": "g"}]\nSo.',
        "Hm.\nSo.",
        [("f", '{"a": "]"}'), ("g", "{}")],
    ),
    ("mistral", f"[TOOL_CALLS]get_weather{ARGUMENTS}", "", [("get_weather", ARGUMENTS)]),
    ("mistral", 'So:[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g-2[ARGS]{}', "So:", [("f", '{"a": 1}'), ("g-2", "{}")]),
]

MALFORMED: list[Case] = [
    *(
        ("hermes", text, text, [])
        for text in (
            "a < b <tool <tool_call> <tool_call>",
            "<tool_call>not JSON</tool_call>",
            '<tool_call>["name"]</tool_call>',
            "<tool_call>{}</tool_call>",
            '<tool_call>{"arguments": {"a": 1}}</tool_call>',
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": null}</tool_call>',
            '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
            "<tool_call>{'name': 'f'}</tool_call>",
            '<tool_call>{"name": "f", ',
            '<tool_call>{"arguments": {"a": 1}, "name": "f',
        )
    ),
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    ("hermes", '<tool_call>oh <tool_call>{"name": "f"}</tool_call>', "<tool_call>oh ", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "c', "", [("f", '{"a": [1, {"b": "c')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', "}}</tool_call>", [("f", '{"a": 1,')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} or so </tool_call>', " or so </tool_call>", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x": ?}', ', "x": ?}', [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call>\n<tool_call>bad</tool_call>',
        "\n<tool_call>bad</tool_call>",
        [("f", "{}")],
    ),
    *(
        ("llama3", text, text, [])
        for text in (
            '{"name": "Bob", "age": 3}',
            '{"name": "Bob"}',
            '{"answer": {"name": "f", "parameters": {}}}',
            '{"parameters": {"a": 1}}',
            'Say {"name": "f", "parameters": {}}',
            '<|python_tag|>print("hi")',
            " <|python_tag|>",
            ' {"name": "f"',
            "  ",
        )
    ),
    ("llama3", '{"name": "f", "parameters": {}}; {"x": 1}', '; {"x": 1}', [("f", "{}")]),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "g"', '; {"name": "g"', [("f", "{}")]),
    *(
        ("mistral", text, text, [])
        for text in (
            "[TOOL_CALLS]",
            "[TOOL_CALLS] []",
            "[TOOL_CALLS] I think so",
            "[TOOL_CALLS]name [1]",
            "[TOOL_CALLS]{}",
            '[TOOL_CALLS] [{"name": "f", "arguments": [1]}]',
            "x[TOOL[TOOL_CALLS",
        )
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f"}, 5]', ", 5]", [("f", "{}")]),
]


def fed(style: str, pieces: list[str]) -> tuple[str, list[ToolCall], list[ToolCallDelta]]:
    parser = tool_call_parser(style, "seed")
    parts = [*(parser.push(piece) for piece in pieces), parser.flush()]
    deltas = [delta for part in parts for delta in part.tool_calls]
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        name, arguments = delta.function.name, delta.function.arguments
        is_first = delta.index not in calls
        assert is_first == (name is not None) == (delta.id is not None) == (delta.type == "function")
        before = calls.get(delta.index) or ToolCall(delta.id or "", FunctionCall(name or "", ""))
        whole = FunctionCall(before.function.name, before.function.arguments + arguments)
        calls[delta.index] = ToolCall(before.id, whole)
    assert list(calls) == list(range(len(calls)))
    return "".join(part.content for part in parts), list(calls.values()), deltas


@pytest.mark.parametrize(("style", "text", "content", "calls"), GOOD + MALFORMED)
def test_content_and_calls(style: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    found, found_calls = parse(style, text, "seed")
    assert (found, [(call.function.name, call.function.arguments) for call in found_calls]) == (content, calls)
    assert fed(style, list(text))[:2] == (found, found_calls)
    for size in (2, 3, 7, 16):
        assert fed(style, [text[i : i + size] for i in range(0, len(text), size)])[:2] == (found, found_calls)


@pytest.mark.parametrize(("style", "text", "content", "calls"), GOOD)
def test_arguments_are_json_objects(style: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert all(isinstance(json.loads(call.function.arguments), dict) for call in parse(style, text)[1])


def test_arguments_stream_as_they_come() -> None:
    parser = tool_call_parser("hermes", "r")
    assert parser.push('Hi<tool_call>{"name": "f", "arguments":').tool_calls == ()
    (first,) = parser.push(' {"a"').tool_calls
    assert (first.index, first.function) == (0, FunctionCallDelta('{"a"', "f"))
    (second,) = parser.push(': "x').tool_calls
    assert second == ToolCallDelta(0, FunctionCallDelta(': "x'))
    (third,) = parser.push('"}}</tool_call>').tool_calls
    assert third.function.arguments == '"}'
    both = parser.push('<tool_call>{"name": "g", "arguments": {}}</tool_call><tool_call>{"name": "h"}').tool_calls
    assert [(delta.index, delta.function) for delta in both] == [
        (1, FunctionCallDelta("{}", "g")),
        (2, FunctionCallDelta("{}", "h")),
    ]


def test_content_is_held_only_while_it_may_be_a_marker() -> None:
    parser = tool_call_parser("hermes", "r")
    pushes = ["a <", "b", " <tool", "_", "box>", " <tool_call>", "{", "x"]
    assert [parser.push(text).content for text in pushes] == [
        "a ", "<b", " ", "", "<tool_box>", " ", "", "<tool_call>{x",
    ]  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_ids_tell_calls_and_texts_apart_and_repeat(style: str) -> None:
    texts = {
        "hermes": '<tool_call>{"name": "f"}</tool_call>' * 2,
        "llama3": '{"name": "f", "parameters": {}};{"name": "f", "parameters": {}}',
        "mistral": "[TOOL_CALLS]f{}[TOOL_CALLS]f{}",
    }
    ids = [call.id for seed in ("a", "b", "a") for call in parse(style, texts[style], seed)[1]]
    assert len(ids) == 6
    assert len(set(ids[:4])) == 4
    assert ids[4:] == ids[:2]
    assert all(len(i) == 9 and i.isalnum() for i in ids) or style != "mistral"


def test_an_unknown_style_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="no style 'pythonic'; there are: hermes, llama3, mistral"):
        tool_call_parser("pythonic", "")


JSON_OBJECTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)
WRITTEN = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    JSON_OBJECTS,
    st.booleans(),
    st.sampled_from([None, 1]),
)


@pytest.mark.parametrize("style", STYLES)
@given(arguments=st.lists(WRITTEN, min_size=1, max_size=3), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_every_json_object_comes_through_in_any_pieces(style: str, arguments: list[str], cuts: list[int]) -> None:
    text = {
        "hermes": "".join(f'<tool_call>\n{{"name": "f", "arguments": {a}}}\n</tool_call>\n' for a in arguments),
        "llama3": "; ".join(f'{{"name": "f", "parameters": {a}}}' for a in arguments),
        "mistral": "".join(f"[TOOL_CALLS]f{a}" for a in arguments),
    }[style]
    ends = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    content, calls, _ = fed(style, [text[a:b] for a, b in pairwise(ends)])
    assert content == ""
    assert [call.function.arguments for call in calls] == arguments


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", '{"name": "f", ', '"arguments": ',
    '"parameters": ', '{"name": "f", "parameters": ', "{}", "}", "{", "[", "]", '"', "\\", ",", ";", ":", " ", "\n",
    "<", "tool", "é", '{"a": 1}', "f", "1", "1.", "e5", "tru", "e", "null", '"x"',
)  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=14))
def test_any_text_gives_the_same_however_it_is_cut_and_loses_nothing(style: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = parse(style, text, "seed")
    assert fed(style, list(text))[:2] == whole
    assert fed(style, pieces)[:2] == whole
    content, calls = whole
    if not calls:
        assert content == text
    position = 0  # what came out stands in the text, in order
    for char in content:
        position = text.index(char, position) + 1


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("unit", ["<tool_call>{", "[TOOL_CALLS][{", '{"a":', "[", '<tool_call>{"name":"', "{", "x<"])
def test_long_and_deep_texts_take_time_in_proportion(style: str, unit: str) -> None:
    prefix = {"hermes": '<tool_call>{"name": "f", "arguments": ', "llama3": '{"name": "f", "parameters": '}.get(
        style, ""
    )
    text = prefix + unit * (200_000 // len(unit))
    began = time.process_time()
    content, calls = parse(style, text)
    assert time.process_time() - began < 5
    assert len(content) + sum(len(call.function.arguments) for call in calls) + len(prefix) >= len(text)


def test_values_have_the_shape_of_openais_json() -> None:
    (call,) = parse("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>')[1]
    shape = {"id": call.id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert msgspec.to_builtins(call) == shape
    parser = tool_call_parser("mistral", "r")
    (first,) = parser.push('[TOOL_CALLS]f{"').tool_calls
    (second,) = parser.push("a").tool_calls
    assert msgspec.to_builtins(first) == {
        "index": 0,
        "id": first.id,
        "type": "function",
        "function": {"name": "f", "arguments": '{"'},
    }
    assert msgspec.to_builtins(second) == {"index": 0, "function": {"arguments": "a"}}
