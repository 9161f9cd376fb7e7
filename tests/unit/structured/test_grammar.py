"""Texts drawn under a grammar have the form that was asked for; end tokens come exactly where the text is complete."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from procengine.errors import InvalidRequestError, RequestFailedError
from procengine.structured.compiler import GrammarCompiler
from procengine.structured.grammar import Grammar
from procengine.structured.spec import StructuredOutputs
from procengine.tokenizer import Tokenizer
from tests.tiny_tokenizers import FAMILIES
from tests.unit.structured.schemas import SCHEMAS
from tests.unit.structured.walks import allowed_tokens, walk

EOS = {"byte_level": {279, 280}, "sentencepiece": {2}, "byte_level_in_sequence": {279}}  # as the GGUF metadata has it


@cache
def tiny(family: str) -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = FAMILIES[family]()
    return tokenizer, GrammarCompiler(tokenizer.backend.to_str(), EOS[family])


def drawn(family: str, seed: int, length: int = 40, **fields: Any) -> str:
    tokenizer, compiler = tiny(family)
    return walk(compiler.compile(StructuredOutputs(**fields)), tokenizer, EOS[family], seed, length)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
def test_json_validates(family: str, name: str) -> None:
    for seed in range(4):
        text = drawn(family, seed, 15, json_schema=SCHEMAS[name])
        jsonschema.validate(json.loads(text), SCHEMAS[name])


def test_a_schema_may_be_text_and_whitespace_may_be_chosen() -> None:
    schema = SCHEMAS["flat_object"]
    plain = drawn("byte_level", 1, json_schema=json.dumps(schema), disable_any_whitespace=True)
    assert plain.startswith('{"name":"')
    lines = drawn("byte_level", 1, json_schema=schema, whitespace_pattern=r"\n")
    assert lines.startswith('{\n"name"')
    for text in (plain, lines):
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("seed", range(10))
def test_a_json_object_is_an_object(seed: int) -> None:
    assert isinstance(json.loads(drawn("byte_level_in_sequence", seed, json_object=True)), dict)


@pytest.mark.parametrize(
    "regex", ["[a-f0-9]{4}", "(a|bc)+d?", r"\d{3}-\d{2}", "é+日?", "a/b\"c'", "(?i:abc)", "(?s:.){3}", "x*"]
)
def test_the_whole_text_matches_a_regex(regex: str) -> None:
    texts = [drawn("byte_level", seed, 10, regex=regex) for seed in range(15)]
    assert [text for text in texts if not re.fullmatch(regex, text)] == []


def test_thousands_of_choices_are_as_good_as_a_few() -> None:
    choices = tuple(f"{number}th" for number in range(5000))
    texts = {drawn("byte_level", seed, choice=choices) for seed in range(10)}
    assert texts <= {*choices} and len(texts) > 1


SPELT_SPECIALS: list[dict[str, Any]] = [
    {"choice": ("<|end|>", "a<|start|>")},
    {"regex": r"a<\|end\|>{1,2}"},
    {"grammar": 'start: "<|start|>" /[ab]/ "<|end|>"'},
    {"json_schema": {"const": {"<|end|>": "<|start|>é"}}, "disable_any_whitespace": True},
]


@pytest.mark.parametrize("fields", SPELT_SPECIALS, ids=str)
def test_the_characters_of_a_special_token_are_spelt_with_others(fields: dict[str, Any]) -> None:
    form = {
        "choice": r"<\|end\|>|a<\|start\|>",
        "regex": r"a<\|end\|>{1,2}",
        "grammar": r"<\|start\|>[ab]<\|end\|>",
        "json_schema": r'\{"<\|end\|>":"<\|start\|>é"\}',
    }[next(iter(fields))]
    for seed in range(5):
        assert re.fullmatch(form, drawn("byte_level", seed, **fields))


CHOICES = (
    "yes",
    "no",
    "yes and no",
    'a "b"',
    "back\\slash",
    "new\nline",
    "\x7f",
    "\x00",
    "日本語",
    "👩",
    "/",
    "<[5]>",
    " ",
)


def test_every_choice_and_nothing_else_is_drawn() -> None:
    assert {drawn("byte_level", seed, choice=CHOICES) for seed in range(400)} == set(CHOICES)


GRAMMARS = {
    "lark": 'start: greeting " " NAME\ngreeting: "hello" | "bye"\nNAME: /[A-Z][a-z]{1,4}/',
    "gbnf": 'root ::= greeting " " name\ngreeting ::= "hello" | "bye"\nname ::= [A-Z] [a-z]{1,4}',
}


@pytest.mark.parametrize("syntax", GRAMMARS)
def test_grammars_are_lark_or_gbnf(syntax: str) -> None:
    for seed in range(10):
        assert re.fullmatch("(hello|bye) [A-Z][a-z]{1,4}", drawn("byte_level", seed, grammar=GRAMMARS[syntax]))


def compiled(**fields: Any) -> tuple[Grammar, Tokenizer]:
    tokenizer, compiler = tiny("byte_level")
    return compiler.compile(StructuredOutputs(**fields)), tokenizer


def test_each_end_token_is_allowed_exactly_where_the_text_is_complete() -> None:
    for end in EOS["byte_level"]:
        grammar, tokenizer = compiled(regex="ab?")
        a, b = tokenizer.encode("a") + tokenizer.encode("b")
        assert (allowed_tokens(grammar), grammar.is_finished) == ([a], False)
        grammar.consume(a)
        assert (allowed_tokens(grammar), grammar.is_finished) == ([b, *sorted(EOS["byte_level"])], False)
        grammar.consume(end)
        assert (allowed_tokens(grammar), grammar.is_finished) == (sorted(EOS["byte_level"]), True)
        for again in EOS["byte_level"]:  # a request that ignores end tokens goes on
            grammar.consume(again)


def test_a_text_that_nothing_can_follow_is_finished_before_its_end_token() -> None:
    grammar, tokenizer = compiled(choice=("ab",))
    for token_id in tokenizer.encode("ab"):
        assert not grammar.is_finished
        grammar.consume(token_id)
    assert grammar.is_finished
    assert allowed_tokens(grammar) == sorted(EOS["byte_level"])
    grammar.consume(min(EOS["byte_level"]))


@pytest.mark.parametrize("token_id", [98, 279, 282, 283, 10**6])  # the last two are not the tokenizer's
def test_a_token_that_the_mask_forbids_fails_its_request(token_id: int) -> None:
    grammar, _ = compiled(regex="ab")
    with pytest.raises(RequestFailedError, match="no token is left that the grammar and all other rules allow"):
        grammar.consume(token_id)


def test_a_token_that_does_not_exist_is_our_mistake() -> None:
    grammar, _ = compiled(regex="ab")
    with pytest.raises(AssertionError):
        grammar.consume(-1)
    grammar.consume(97)  # and changes nothing


def test_a_finished_text_takes_nothing_more() -> None:
    grammar, _ = compiled(regex="a")
    grammar.consume(97)
    with pytest.raises(RequestFailedError, match="no token is left that the grammar and all other rules allow"):
        grammar.consume(97)


def test_the_mask_has_one_bit_for_each_token() -> None:
    grammar, tokenizer = compiled(regex="(?s:.)*")
    assert grammar.num_mask_words == (tokenizer.vocab_size + 31) // 32 == 9
    assert max(allowed_tokens(grammar)) < tokenizer.vocab_size
    with pytest.raises(AssertionError):
        grammar.fill_mask(np.zeros(10, np.int32))


def test_a_grammar_that_becomes_too_complex_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    from procengine.structured import compiler as module

    limits = llguidance.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(module, "parser_limits", lambda: limits)
    tokenizer, compiler = tiny("byte_level")
    grammar = compiler.compile(StructuredOutputs(regex="(.*a.{500})"))
    with pytest.raises(RequestFailedError, match=r"too complex: lexer error: too many states: 300 >= 300$"):
        walk(grammar, tokenizer, EOS["byte_level"], seed=1, length=500)


def test_a_copy_goes_its_own_way() -> None:
    first, tokenizer = compiled(choice=("abc", "abd", "x"))
    a, b, c, d, x = (tokenizer.encode(char)[0] for char in "abcdx")
    copies = [first.copy() for _ in range(3)]
    assert all(allowed_tokens(one) == [a, x] for one in copies)
    copies[0].consume(x)
    first.consume(a)
    later = first.copy()
    first.consume(b)
    assert allowed_tokens(first) == [c, d] and allowed_tokens(later) == [b]
    assert copies[0].is_finished and not copies[1].is_finished and allowed_tokens(copies[1]) == [a, x]


def test_compilations_in_threads_give_grammars_of_their_own() -> None:
    tokenizer = FAMILIES["byte_level"]()
    compiler = GrammarCompiler(tokenizer.backend.to_str(), [279])
    words = [f"{chr(97 + i)}{i}" for i in range(26)]
    with ThreadPoolExecutor(8) as pool:
        grammars = list(pool.map(lambda word: compiler.compile(StructuredOutputs(choice=(word,))), words))
    assert [walk(grammar, tokenizer, {279}, 0) for grammar in grammars] == words


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "regex syntax": ({"regex": "a("}, "(?s)^regex: .*unclosed group"),
    "look-ahead": ({"regex": "(?=a)b"}, "(?s)^regex: .*look-around"),
    "regex without a text": ({"regex": r"[^\x00-\u{10ffff}]"}, "^regex: "),
    "half a surrogate in a regex": ({"regex": "\ud800"}, "^regex: holds half of a surrogate pair"),
    "half a surrogate in a choice": ({"choice": ("a", "\udc00")}, "^choice: holds half of a surrogate pair"),
    "half a surrogate in a schema": ({"json_schema": {"const": "\ud800"}}, "^json_schema: holds half"),
    "long regex": ({"regex": "a" * 200_000}, "^regex: 200000 bytes are more than the limit of 131072"),
    "long choices": ({"choice": ("é" * 40_000,) * 2}, "^choice: 160000 bytes are more"),
    "schema text": ({"json_schema": '{"type"'}, "^json_schema: not a JSON value"),
    "schema of a list": ({"json_schema": "[1]"}, r"^json_schema: must be a JSON object, got \[1\]"),
    "injected schema": (
        {"json_schema": '{}}, {"lark_grammar": "start: "}], "x": [{"y": {}'},
        "^json_schema: not a JSON",
    ),
    "unknown type": ({"json_schema": {"type": "foo"}}, "^json_schema: Invalid type: foo"),
    "unsupported keyword": (
        {"json_schema": {"not": {"type": "string"}}},
        '^json_schema: Unimplemented keys: \\["not"\\]',
    ),
    "unsatisfiable": ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 3}}, "^json_schema: Unsatisf"),
    "empty enum": ({"json_schema": {"enum": []}}, "^json_schema: Unsatisfiable"),
    "remote reference": ({"json_schema": {"$ref": "http://example.com/x"}}, "^json_schema: .*not present"),
    "not a number": ({"json_schema": {"minimum": float("nan")}}, "^json_schema: not a JSON value"),
    "not JSON": ({"json_schema": {"enum": [{1, 2}]}}, "^json_schema: not a JSON value: Object of type set"),
    "deep schema text": ({"json_schema": '{"a":' * 100_000}, "^json_schema: not a JSON value"),
    "fuel": ({"grammar": "start: A\nA: /(.*a.{50})/ & /(.*b.{60})/ & ~/(.*c.{30})/"}, "^grammar: fuel exhausted"),
    "many alternatives": (
        {"json_schema": {"anyOf": [{"properties": {"a": {"const": i}, "b": {}}} for i in range(2000)]}},
        "^json_schema: grammar size",
    ),
    "large multiples": ({"json_schema": {"type": "integer", "multipleOf": 999_983}}, "^json_schema: multipleOf 999983"),
    "multiples together": (
        {"json_schema": {"allOf": [{"type": "number", "multipleOf": 10.09}, {"multipleOf": 9.7}]}},
        "^json_schema: multipleOf",
    ),
    "multiples in a grammar": ({"grammar": 'start: %json {"\\u006dultipleOf" :\n99991}'}, "^grammar: multipleOf 99991"),
    "whitespace": ({"json_object": True, "whitespace_pattern": "("}, "(?s)^json_object: .*unclosed"),
    "lark syntax": ({"grammar": "start: foo"}, '^grammar: .*unknown name: "foo"'),
    "deep lark": ({"grammar": "start: " + "(" * 3000}, "^grammar: .*too deeply nested"),
    "nothing": ({"grammar": ""}, "^grammar: "),
    "gbnf syntax": ({"grammar": 'root ::= "a'}, "^grammar: not GBNF: Unexpected end"),
    "gbnf escape": ({"grammar": 'root ::= "\\'}, "^grammar: not GBNF"),
    "deep gbnf": ({"grammar": "root ::= " + "(" * 10_000}, "^grammar: not GBNF"),
    "long gbnf": ({"grammar": "root ::= x" + "x" * 17_000}, "^grammar: 17010 characters of GBNF"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_the_field_and_the_reason(name: str) -> None:
    fields, message = REFUSED[name]
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compiled(**fields)
    assert len(str(caught.value)) < 700
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("family", ["wordpiece", "metaspace"])
def test_a_tokenizer_that_llguidance_cannot_read_is_refused_with_the_reason(family: str) -> None:
    compiler = GrammarCompiler(FAMILIES[family]().backend.to_str(), [0])
    with pytest.raises(InvalidRequestError, match="not available for this model's tokenizer: can't determine decoder"):
        compiler.compile(StructuredOutputs(json_object=True))


@pytest.mark.parametrize("eos", [[], [5000]])
def test_a_model_without_a_usable_end_token_has_no_structured_output(eos: list[int]) -> None:
    compiler = GrammarCompiler(FAMILIES["byte_level"]().backend.to_str(), eos)
    with pytest.raises(InvalidRequestError, match=r"not available for this model's tokenizer: (?i:eos)"):
        compiler.compile(StructuredOutputs(json_object=True))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> tuple[Tokenizer, GrammarCompiler]:
    from procengine.gguf_file import GGUFFile
    from procengine.gguf_tokenizer import build_tokenizer

    backend = build_tokenizer(GGUFFile(smollm2_gguf).metadata, str(smollm2_gguf))
    return Tokenizer(backend), GrammarCompiler(backend.to_str(), [2, 0])


@pytest.mark.model
@pytest.mark.parametrize("name", SCHEMAS)
def test_smollm2_tokens_give_json_that_validates(smollm2: tuple[Tokenizer, GrammarCompiler], name: str) -> None:
    tokenizer, compiler = smollm2
    for seed in range(4):
        text = walk(compiler.compile(StructuredOutputs(json_schema=SCHEMAS[name])), tokenizer, {0, 2}, seed, 15)
        jsonschema.validate(json.loads(text), SCHEMAS[name])


@pytest.mark.parametrize("seed", range(5))
def test_objects_have_the_properties_that_are_named(seed: int) -> None:
    assert set(json.loads(drawn("byte_level", seed, 15, json_schema=SCHEMAS["open_object"]))) == {"a"}
