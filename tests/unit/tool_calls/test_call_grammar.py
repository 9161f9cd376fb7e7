"""Whatever is drawn under a grammar of calls parses: to calls that the functions' schemas allow, and nothing else."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from procengine.errors import InvalidRequestError
from procengine.structured.compiler import GrammarCompiler
from procengine.structured.spec import StructuredOutputs
from procengine.tokenizer import Tokenizer
from procengine.tool_calls import STYLES, parse
from procengine.tool_calls.call_grammar import call_grammar
from tests.tiny_tokenizers import FAMILIES
from tests.unit.structured.walks import walk

EOS = {279, 280}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 4}},
}
NUMBERS = {
    "properties": {"n": {"type": "array", "items": {"$ref": "#/$defs/city"}, "maxItems": 2}},
    "additionalProperties": False,
    "$defs": {"city": {"type": "number"}},  # the name that the other function has for something else
}
FUNCTIONS: dict[str, dict[str, Any] | None] = {"get_weather": WEATHER, 'a"b\\é日': NUMBERS, "no.arguments": None}


@cache
def tiny() -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = FAMILIES["byte_level"]()
    return tokenizer, GrammarCompiler(tokenizer.backend.to_str(), EOS)


def drawn(style: str, seed: int, *, only_one: bool, functions: dict[str, Any] = FUNCTIONS) -> str:
    tokenizer, compiler = tiny()
    grammar = compiler.compile(StructuredOutputs(grammar=call_grammar(style, functions, only_one=only_one)))
    return walk(grammar, tokenizer, EOS, seed, 120)


@pytest.mark.parametrize("only_one", [True, False], ids=["one", "several"])
@pytest.mark.parametrize("style", STYLES)
def test_every_text_is_calls_and_nothing_else(style: str, only_one: bool) -> None:
    counts, names = set(), set()
    for seed in range(25):
        text = drawn(style, seed, only_one=only_one)
        content, calls = parse(style, text)
        assert content == ""
        for call in calls:
            schema = FUNCTIONS[call.function.name] or {"maxProperties": 0}
            arguments = json.loads(call.function.arguments)
            assert isinstance(arguments, dict)
            jsonschema.validate(arguments, schema)
            names.add(call.function.name)
        counts.add(len(calls))
    assert counts == {1} if only_one else counts > {1}
    assert names == set(FUNCTIONS)


@pytest.mark.parametrize("style", STYLES)
def test_json_is_written_with_single_spaces(style: str) -> None:
    text = drawn(style, 3, only_one=True, functions={"get_weather": WEATHER})
    assert f'{{"name": "get_weather", "{"parameters" if style == "llama3" else "arguments"}": {{"city": "' in text
    assert '", "unit": "' in text


def test_a_schema_that_has_no_grammar_is_refused() -> None:
    _, compiler = tiny()
    grammar = call_grammar("hermes", {"f": {"type": "object", "properties": {"a": {"type": "nothing"}}}}, only_one=True)
    with pytest.raises(InvalidRequestError, match=r"^grammar: .*nothing"):
        compiler.compile(StructuredOutputs(grammar=grammar))
