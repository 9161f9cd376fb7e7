"""Objects that name their properties and say nothing of others are written with the named ones only. Pure.

Owns: which schemas of a JSON schema are closed for that. Never does: judge a schema, or allow what it forbids: whatever
satisfies the closed schema satisfies the open one too.

JSON Schema lets an object have properties that nobody named. A model that may go on will, small ones without end, and
callers who leave `additionalProperties` out (classes of pydantic do) have no use for it. Who wants more says `true`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["close_objects", "closed_text"]

# Several schemas judge one value: closed one by one they might leave it no properties at all, or turn a no into a yes.
_TOGETHER: Final = frozenset(
    ("allOf", "oneOf", "not", "if", "contains", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")
)
_ELSEWHERE: Final = frozenset(("anyOf", "$ref"))
_OF_VALUES: Final = frozenset(("properties", "required", "patternProperties", "propertyNames", "const", "enum"))
_OF_OTHERS: Final = frozenset(
    (
        *("additionalProperties", "patternProperties", "propertyNames", "minProperties", "dependentRequired"),
        *("const", "enum", "anyOf", "$ref"),
    )
)
_SCHEMAS: Final = ("items", "additionalProperties", "propertyNames")
_LISTS: Final = ("anyOf", "prefixItems")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")


def close_objects(schema: dict[str, Any]) -> None:
    """Close what may be closed, in place; nothing, where one value is judged by several schemas."""
    found = list(_schemas_in(schema))
    if any(_is_judged_elsewhere(one) for one in found):
        return
    for one in found:
        names = one.get("properties")
        if isinstance(names, dict) and not _OF_OTHERS & one.keys() and _are_named(one.get("required", []), names):
            one["additionalProperties"] = False


def closed_text(text: str) -> str:
    """The same for the text of a schema, an object."""
    schema = json.loads(text)
    close_objects(schema)
    return json.dumps(schema, ensure_ascii=False)


def _are_named(required: object, names: dict[str, Any]) -> bool:
    return isinstance(required, list) and all(isinstance(name, str) and name in names for name in required)


def _is_judged_elsewhere(schema: dict[str, Any]) -> bool:
    elsewhere = _ELSEWHERE & schema.keys()
    return bool(_TOGETHER & schema.keys()) or len(elsewhere) > 1 or bool(elsewhere and _OF_VALUES & schema.keys())


def _schemas_in(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all below it, but not what only looks like one (an example, a constant)."""
    open_values: list[Any] = [schema]
    while open_values:
        value = open_values.pop()
        if not isinstance(value, dict):
            continue
        yield value
        open_values += [value.get(key) for key in _SCHEMAS]
        open_values += [one for key in _LISTS if isinstance(value.get(key), list) for one in value[key]]
        open_values += [one for key in _MAPS if isinstance(value.get(key), dict) for one in value[key].values()]
