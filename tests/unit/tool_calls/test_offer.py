"""What tools and tool_choice come to, and every way to give them wrongly."""

from __future__ import annotations

import re
from typing import Any

import pytest

from procengine.errors import InvalidRequestError
from procengine.sampling_params import SamplingParams
from procengine.structured.spec import StructuredOutputs
from procengine.tool_calls import STYLES
from procengine.tool_calls.offer import ToolOffer, make_offer

F = {"type": "function", "function": {"name": "f", "description": "does f", "parameters": {"type": "object"}}}
G = {"type": "function", "function": {"name": "g"}}
NAMED_G = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize("parser", ["none", *STYLES])
@pytest.mark.parametrize("tool_choice", [None, "none"])
def test_without_tools_nothing_changes(parser: str, tool_choice: Any) -> None:
    offer = make_offer(None, tool_choice, parser)
    assert offer == ToolOffer(None, None, None)
    params = SamplingParams(detokenize=False, output_kind="cumulative")
    assert offer.params(params) == offer.stream_params(params) == params
    assert offer.params(None) == offer.stream_params(None, echo=True) == SamplingParams()


@pytest.mark.parametrize("style", STYLES)
def test_auto_shows_the_tools_and_reads_the_text_with_its_special_tokens(style: str) -> None:
    for choice in (None, "auto"):
        offer = make_offer([F, G], choice, style)
        assert (offer.tools, offer.style, offer.constraint) == ([F, G], style, None)
        assert offer.params(SamplingParams(top_k=5)) == SamplingParams(top_k=5, skip_special_tokens=False)
        free = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
        assert offer.params(free).structured_outputs == free.structured_outputs


def test_none_hides_the_tools() -> None:
    assert make_offer([F], "none", "hermes") == ToolOffer()


def test_a_group_that_reads_no_calls_shows_the_tools_and_leaves_the_text() -> None:
    offer = make_offer([F], "auto", "none")
    assert (offer.tools, offer.style) == ([F], None)
    assert offer.params(SamplingParams(detokenize=False)) == SamplingParams(detokenize=False)
    assert make_offer([F], "auto", "a style of a newer version").style is None


@pytest.mark.parametrize("style", STYLES)
def test_a_demanded_call_is_a_constraint(style: str) -> None:
    grammars = []
    for choice in ("required", NAMED_G):
        offer = make_offer([F, G], choice, style)
        params = offer.params(SamplingParams(top_k=5))
        assert params.structured_outputs is not None
        assert params.structured_outputs == offer.constraint
        assert (params.top_k, params.skip_special_tokens) == (5, False)
        grammars.append(params.structured_outputs.grammar or "")
    assert ['\\"f\\"' in grammar for grammar in grammars] == [True, False]
    assert ['\\"g\\"' in grammar for grammar in grammars] == [True, True]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], "tools: must be a list of at least one function, got []"),
        ("f", "tools: must be a list of at least one function, got 'f'"),
        (F, "tools: must be a list of at least one function, got {"),
        (7, "tools: must be a list of at least one function, got 7"),
        ([F, "g"], "tools[1]: must be an object, got 'g'"),
        ([{"type": "retrieval"}], "tools[0].type: must be \"function\", got 'retrieval'"),
        ([{"type": "function"}], "tools[0].function: must be an object, got None"),
        ([{"name": "f"}], "tools[0].function: must be an object, got None"),
        ([{"function": {}}], "tools[0].function.name: must be a non-empty, printable string, got None"),
        ([{"function": {"name": ""}}], "tools[0].function.name: must be a non-empty, printable string, got ''"),
        (
            [{"function": {"name": "a\nb"}}],
            "tools[0].function.name: must be a non-empty, printable string, got 'a\\nb'",
        ),
        ([{"function": {"name": 7}}], "tools[0].function.name: must be a non-empty, printable string, got 7"),
        (
            [{"function": {"name": "f", "parameters": []}}],
            "tools[0].function.parameters: must be a JSON schema whose type is object, got []",
        ),
        (
            [{"function": {"name": "f", "parameters": {"type": "string"}}}],
            "tools[0].function.parameters: must be a JSON schema whose type is object, got {'type': 'string'}",
        ),
        ([F, G, F], "tools[2].function.name: 'f' is there twice"),
    ],
)
@pytest.mark.parametrize("tool_choice", ["auto", "none", "required"])
def test_wrong_tools_are_named(tools: Any, message: str, tool_choice: Any) -> None:
    with pytest.raises(InvalidRequestError, match="^" + re.escape(message)):
        make_offer(tools, tool_choice, "hermes")


@pytest.mark.parametrize(
    ("tool_choice", "message"),
    [
        ("any", "tool_choice: must be one of auto, none, required or {"),
        ("", "tool_choice: must be one of auto, none, required or {"),
        (7, "tool_choice: must be one of auto, none, required or {"),
        (True, "tool_choice: must be one of auto, none, required or {"),
        ({}, "tool_choice: must be one of auto, none, required or {"),
        ({"type": "function"}, "tool_choice: must be one of auto, none, required or {"),
        ({"type": "tool", "function": {"name": "f"}}, "tool_choice: must be one of auto, none, required or {"),
        ({"type": "function", "function": {"name": 7}}, "tool_choice: must be one of auto, none, required or {"),
        (
            {"type": "function", "function": {"name": "h"}},
            "tool_choice: there is no function 'h' in tools, which has f, g",
        ),
    ],
)
def test_wrong_tool_choice_is_named(tool_choice: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match="^" + re.escape(message)):
        make_offer([F, G], tool_choice, "hermes")


@pytest.mark.parametrize("tool_choice", ["auto", "required", NAMED_G])
def test_a_choice_needs_tools(tool_choice: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^tool_choice: .* needs tools, and none were given$"):
        make_offer(None, tool_choice, "hermes")


@pytest.mark.parametrize("tool_choice", ["required", NAMED_G])
def test_a_demanded_call_needs_a_group_that_reads_it(tool_choice: Any) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^tool_choice: .*--tool-call-parser, one of hermes, llama3, mistral$"
    ):
        make_offer([F, G], tool_choice, "none")


def test_params_that_leave_nothing_to_read_are_refused() -> None:
    offer, demand = make_offer([F], None, "hermes"), make_offer([F], "required", "hermes")
    with pytest.raises(InvalidRequestError, match=r"^detokenize: must be true with tools"):
        offer.params(SamplingParams(detokenize=False))
    with pytest.raises(InvalidRequestError, match=r"^output_kind: .*cumulative"):
        offer.stream_params(SamplingParams(output_kind="cumulative"))
    with pytest.raises(InvalidRequestError, match=r"^echo: cannot be given along with tools"):
        offer.stream_params(None, echo=True)
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: cannot be given along with a tool_choice"):
        demand.params(SamplingParams(structured_outputs=StructuredOutputs(regex="a")))


def test_a_demand_for_one_call_at_most_is_part_of_the_grammar() -> None:
    one, several = (make_offer([F, G], "required", "hermes", parallel=parallel) for parallel in (False, True))
    assert one.constraint is not None and several.constraint is not None
    assert "call)*" not in str(one.constraint.grammar) and "call)*" in str(several.constraint.grammar)
    assert make_offer([F], "auto", "hermes", parallel=False).constraint is None
