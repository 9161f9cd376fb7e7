"""JSON schemas of mixed kind, as clients send them."""

from __future__ import annotations

from typing import Any

__all__ = ["SCHEMAS"]


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


_STRING, _INTEGER, _NUMBER, _BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))

SCHEMAS: dict[str, dict[str, Any]] = {
    "string": _STRING,
    "integer": _INTEGER,
    "number": _NUMBER,
    "boolean": _BOOLEAN,
    "null": {"type": "null"},
    "anything": {},
    "two_types": {"type": ["integer", "null"]},
    "any_object": {"type": "object"},
    "any_array": {"type": "array"},
    "const_string": {"const": 'a "quoted" \\ line\n'},
    "const_object": {"const": {"a": [1, None, {"b": "é"}]}},
    "enum_strings": {"enum": ["red", "green", "blue"]},
    "enum_mixed": {"enum": [1, "1", None, True, [1, 2], {"a": 1}]},
    "enum_typed": {"type": "string", "enum": ["日本", "語", ""]},
    "min_length": {"type": "string", "minLength": 3},
    "length": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,5}[0-9]?$"},
    "pattern_anywhere": {"type": "string", "pattern": "[0-9]{2}"},
    "pattern_alternatives": {"type": "string", "pattern": "^(yes|no|maybe so)$"},
    "date": {"type": "string", "format": "date"},
    "date_time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email"},
    "minimum": {"type": "integer", "minimum": 5},
    "maximum": {"type": "integer", "maximum": -5},
    "range": {"type": "integer", "minimum": -17, "maximum": 123},
    "open_range": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "number_range": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple_of": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "multiple_of_minutes": {"type": "integer", "multipleOf": 600},
    "multiple_of_cents": {"type": "number", "multipleOf": 0.25},
    "items": {"type": "array", "items": _INTEGER},
    "num_items": {"type": "array", "items": _BOOLEAN, "minItems": 2, "maxItems": 3},
    "nested_arrays": {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": _INTEGER}}},
    "tuple": {"type": "array", "prefixItems": [_STRING, _INTEGER], "items": False, "minItems": 2},
    "tuple_with_rest": {"type": "array", "prefixItems": [{"const": 1}], "items": _BOOLEAN},
    "flat_object": _object(name=_STRING, age=_INTEGER, tall=_BOOLEAN),
    "optional_properties": _object([], a=_INTEGER, b=_STRING, c=_BOOLEAN),
    "some_required": _object(["b"], a=_INTEGER, b=_INTEGER, c=_INTEGER),
    "open_object": {"type": "object", "properties": {"a": _INTEGER}, "required": ["a"]},
    "map": {"type": "object", "additionalProperties": _INTEGER},
    "pattern_properties": {
        "type": "object",
        "patternProperties": {"^x_": _INTEGER},
        "additionalProperties": _BOOLEAN,
    },
    "odd_keys": {
        "type": "object",
        "properties": dict.fromkeys(('a "b"', "c\\d", "é 日", ""), _INTEGER),
        "required": ['a "b"', "c\\d"],
        "additionalProperties": False,
    },
    "deep_object": _object(a=_object(b=_object(c=_object(d={"enum": ["end"]})))),
    "array_of_objects": {"type": "array", "items": _object(id=_INTEGER, tag={"enum": ["x", "y"]}), "minItems": 1},
    "any_of": {"anyOf": [_STRING, _INTEGER, {"type": "null"}]},
    "any_of_objects": {"anyOf": [_object(kind={"const": "a"}, n=_INTEGER), _object(kind={"const": "b"}, s=_STRING)]},
    "one_of": {"oneOf": [_object(kind={"const": "a"}, n=_INTEGER), _object(kind={"const": "b"}, s=_STRING)]},
    "all_of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "definitions": {
        "$defs": {"point": _object(x=_NUMBER, y=_NUMBER)},
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "maxItems": 2,
    },
    "recursive": {
        "$defs": {"node": _object(["value"], value=_INTEGER, next={"$ref": "#/$defs/node"})},
        "$ref": "#/$defs/node",
    },
    "recursive_tree": _object(name={"enum": ["leaf"]}, children={"type": "array", "items": {"$ref": "#"}}),
    "described": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Answer",
        "description": "What pydantic writes.",
        "type": "object",
        "properties": {
            "steps": {"title": "Steps", "type": "array", "items": {"type": "string", "maxLength": 8}, "default": []},
            "score": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
        },
        "required": ["steps"],
    },
}
