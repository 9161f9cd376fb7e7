"""A grammar of texts that are calls of given functions, so that what is generated always parses.

Owns: how a call is written in each style, in llguidance's Lark. Never does: compile, or check a schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from procengine.structured.closed_objects import close_objects

__all__ = ["call_grammar"]

# As models write JSON: one space behind a comma and a colon, no line breaks. It also keeps a model that would do so
# from filling the rest of its answer with spaces.
_PLAIN_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class _Form(NamedTuple):
    """What stands around and between calls."""

    opening: str
    before: str
    arguments: str
    after: str
    between: str
    closing: str


_FORMS: MappingProxyType[str, _Form] = MappingProxyType(
    {
        "hermes": _Form("", "<tool_call>\n", "arguments", "\n</tool_call>", "\n", ""),
        "llama3": _Form("", "", "parameters", "", "; ", ""),
        "mistral": _Form("[TOOL_CALLS][", "", "arguments", "", ", ", "]"),
    }
)


def call_grammar(style: str, parameters_by_name: Mapping[str, Mapping[str, Any] | None], *, only_one: bool) -> str:
    """Lark for one call, or for one or more of them.

    parameters_by_name: the JSON schema of each function's arguments, an object's; None is a function without any. Each
    is a grammar of its own, so its references keep their meaning.
    """
    form = _FORMS[style]
    calls = "call" if only_one else f"call ({_quoted(form.between)} call)*"
    names = " | ".join(f"call_{index}" for index in range(len(parameters_by_name)))
    rules = [
        "start: " + " ".join(part for part in (_quoted(form.opening), calls, _quoted(form.closing)) if part),
        "call: " + " ".join(part for part in (_quoted(form.before), f"({names})", _quoted(form.after)) if part),
    ]
    for index, (name, parameters) in enumerate(parameters_by_name.items()):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments}": '
        rules.append(f'call_{index}: {_quoted(head)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {_schema_text(parameters)}")
    return "\n".join(rules) + "\n"


def _quoted(text: str) -> str:
    """Lark spells strings as JSON does; an empty one is left out."""
    return json.dumps(text) if text else ""


def _schema_text(parameters: Mapping[str, Any] | None) -> str:
    schema = json.loads(json.dumps(_NO_PARAMETERS if parameters is None else dict(parameters)))
    close_objects(schema)
    return json.dumps({"type": "object", **schema, "x-guidance": _PLAIN_JSON}, ensure_ascii=False)
