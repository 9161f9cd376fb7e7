"""Compiles a `StructuredOutputs` into a `Grammar`, with llguidance.

Owns: the grammar library, its view of the tokenizer, and the limits on what a client may ask of it. Never does: know a
request or a step, or import torch. llguidance and not xgrammar, which cannot be imported without torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from procengine.errors import InvalidRequestError
from procengine.structured.closed_objects import closed_text
from procengine.structured.grammar import Grammar
from procengine.structured.limits import check_multiples, multiples_in_grammar, multiples_in_schema, parser_limits
from procengine.structured.spec import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["GrammarCompiler"]

# Conversion from GBNF is Python, and quadratic in the number of rules: half a second at this size, 15 s at six times.
_MAX_GBNF_LENGTH = 16 * 1024
_MAX_REASON = 500
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'


class GrammarCompiler:
    """Grammars for one tokenizer. Safe to use from several threads; most of a compilation runs without the GIL.

    tokenizer_json: the text of a tokenizer.json. eos_token_ids: what may end a text. max_bytes: of a schema, an
    expression, a grammar or all choices together. Nothing is loaded before the first `compile`.
    """

    def __init__(self, tokenizer_json: str, eos_token_ids: Iterable[int], max_bytes: int = 128 * 1024) -> None:
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = sorted(eos_token_ids)
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._loaded: LLTokenizer | None = None

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """A grammar at its start. Takes about a millisecond, a second for the largest schemas that are accepted.

        Raises InvalidRequestError, naming the field and the reason, for what is too large, malformed, not supported,
        or cannot be satisfied by any text.
        """
        from llguidance import LLMatcher

        source = self._source(spec)
        if self._spells_special_token(source):
            source = _without_forcing(source)
        tokenizer = self._tokenizer()
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds what the first step would wait for, and finds grammars without a text
        if matcher.is_error():
            raise InvalidRequestError(f"{spec.kind}: {_reason(matcher.get_error())}")
        return Grammar(matcher, tokenizer.vocab_size, frozenset(self._eos_token_ids))

    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._loaded is None:
                try:
                    self._loaded = LLTokenizer(self._tokenizer_json, eos_token=self._eos_token_ids)
                except ValueError as error:
                    raise InvalidRequestError(
                        f"structured_outputs: not available for this model's tokenizer: {_reason(str(error))}"
                    ) from error
            return self._loaded

    def _spells_special_token(self, source: str) -> bool:
        """Whether the grammar may ask for the characters of a special token, such as "<s>", one after the other."""
        plain = source.replace("\\", "")
        return any(token in plain for token in self._special_tokens)

    @cached_property
    def _special_tokens(self) -> frozenset[str]:
        added = json.loads(self._tokenizer_json).get("added_tokens") or []
        return frozenset(token["content"] for token in added if token.get("special"))

    def _source(self, spec: StructuredOutputs) -> str:
        """The grammar as llguidance takes it: Lark, or Lark or a schema inside its own JSON form."""
        from llguidance import LLMatcher

        if spec.choice is not None:
            self._checked("choice", "".join(spec.choice))
            # One terminal: as alternatives of a rule, thousands would be too many for a row of the parser. Lark spells
            # strings as JSON does.
            choices = " | ".join(json.dumps(text) for text in spec.choice)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        if spec.regex is not None:
            return LLMatcher.grammar_from_regex(self._checked("regex", spec.regex))
        if spec.grammar is not None:
            check_multiples("grammar", multiples_in_grammar(self._checked("grammar", spec.grammar)))
            return LLMatcher.grammar_from_lark(_to_lark(spec.grammar))
        if spec.json_object or spec.json_schema is None:
            schema = '{"type": "object"}'
        else:
            schema = closed_text(self._checked("json_schema", _schema_text(spec.json_schema)))
        overrides: dict[str, Any] = {}
        if spec.whitespace_pattern is not None:
            overrides["whitespace_pattern"] = self._checked("whitespace_pattern", spec.whitespace_pattern)
        elif spec.disable_any_whitespace:
            overrides["whitespace_flexible"] = False
        return LLMatcher.grammar_from_json_schema(schema, overrides=overrides)  # type: ignore[arg-type]

    def _checked(self, field: str, text: str) -> str:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"{field}: holds half of a surrogate pair, which is not Unicode text") from error
        if size > self._max_bytes:
            raise InvalidRequestError(f"{field}: {size} bytes are more than the limit of {self._max_bytes}")
        return text


def _without_forcing(source: str) -> str:
    """The same grammar, without the short cut for text that has no alternative.

    llguidance would tokenize that text as it does a prompt: the characters of a special token become that token, which
    the grammar then refuses. Without, each token is judged by its characters.
    """
    if not source.startswith('{"grammars"'):
        return source + _NO_FORCING
    (grammar,) = json.loads(source)["grammars"]
    schema = grammar["json_schema"]
    lark: str = grammar["lark_grammar"] if schema is None else f"start: %json {json.dumps(schema, ensure_ascii=False)}"
    return lark + _NO_FORCING


def _schema_text(schema: dict[str, Any] | str) -> str:
    """The schema as JSON text, rebuilt: llguidance pastes what it is given into a larger text."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema: not a JSON value: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"json_schema: must be a JSON object, got {text[:100]}")
    check_multiples("json_schema", multiples_in_schema(value))
    return text


def _to_lark(grammar: str) -> str:
    """Lark as it is; GBNF, known by its rule `root`, converted."""
    if re.search(r"^\s*root\s*::=", grammar, re.MULTILINE) is None:
        return grammar
    if len(grammar) > _MAX_GBNF_LENGTH:
        raise InvalidRequestError(
            f"grammar: {len(grammar)} characters of GBNF are more than {_MAX_GBNF_LENGTH}; Lark may be longer"
        )
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library raises nothing narrower
        raise InvalidRequestError(f"grammar: not GBNF: {_reason(str(error))}") from error


def _reason(message: str) -> str:
    """What the library says, without its state dump."""
    text = re.split(r"\n?<(?:state|non-verbose)", message, maxsplit=1)[0].strip()
    if text.startswith("NoExtension"):
        return "no text can satisfy it"
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."
