"""JSON schemas of mixed kind, as clients send them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

__all__ = ["SCHEMAS", "random_schema"]


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


# --- random ones, whose documents are short: every string, array and number has a bound


def random_schema(rnd: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema of mixed kind, nested up to `depth` times, whose documents take some dozen tokens at most."""
    makers = _LEAVES if depth == 0 else [*_LEAVES, *_NESTED, *_NESTED, *_NESTED]
    schema = rnd.choice(makers)(rnd, depth)
    if rnd.random() < 0.15:
        schema |= {"title": "T", "description": "Of no effect."}
    return schema


_Maker = Callable[[random.Random, int], dict[str, Any]]
_NAMES = ["name", "age", "id", "tags", "ok", "x", "y", "é 日", 'a "b"', "c\\d", "$ref_", "note"]


def _bounded_integer(rnd: random.Random, depth: int) -> dict[str, Any]:
    low = rnd.choice([-1000, -17, 0, 1, 99])
    high = low + rnd.choice([0, 1, 9, 150, 100_000])
    keys = rnd.choice([("minimum", "maximum"), ("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
    return {"type": "integer", keys[0]: low, keys[1]: high + (2 if keys[0] != "minimum" else 0)}


def _bounded_number(rnd: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "multipleOf": rnd.choice([0.5, 0.25, 0.125, 5]), "minimum": -20, "maximum": 500}


def _bounded_string(rnd: random.Random, depth: int) -> dict[str, Any]:
    low = rnd.choice([0, 0, 1, 3])
    return {"type": "string", "minLength": low, "maxLength": low + rnd.choice([0, 1, 5, 12])}


def _pattern(rnd: random.Random, depth: int) -> dict[str, Any]:
    patterns = [
        "^[a-z]{2,5}[0-9]?$",
        "^(yes|no|maybe so)$",
        "^[0-9]{4}-[0-9]{2}$",
        "^#[0-9a-fA-F]{6}$",
        "^[é日 ]{1,3}$",
    ]
    return {"type": "string", "pattern": rnd.choice(patterns)}


def _format(rnd: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": rnd.choice(["uuid", "ipv4"])}


def _enum(rnd: random.Random, depth: int) -> dict[str, Any]:
    values = ["red", "green", "日本", "", 'a "b"\n', 1, 2.5, -7, None, True, [1, 2], {"a": 1}]
    return {"enum": rnd.sample(values, rnd.randint(1, 5))}


def _const(rnd: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rnd.choice(["x", 'a "quoted" \\ line\n', 17, None, False, {"a": [1, None, {"b": "é"}]}, []])}


def _plain(rnd: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rnd.choice(["boolean", "null", ["boolean", "null"]])}


def _random_array(rnd: random.Random, depth: int) -> dict[str, Any]:
    low = rnd.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rnd, depth - 1),
        "minItems": low,
        "maxItems": low + rnd.randint(0, 2),
    }


def _random_tuple(rnd: random.Random, depth: int) -> dict[str, Any]:
    items = [random_schema(rnd, depth - 1) for _ in range(rnd.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": rnd.randint(0, len(items))}


def _random_object(rnd: random.Random, depth: int) -> dict[str, Any]:
    names = rnd.sample(_NAMES, rnd.randint(1, 4))
    required = rnd.sample(names, rnd.randint(0, len(names)))
    return _object(required, **{name: random_schema(rnd, depth - 1) for name in names})


def _any_of(rnd: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rnd, depth - 1) for _ in range(rnd.randint(2, 3))]}


def _one_of(rnd: random.Random, depth: int) -> dict[str, Any]:
    kinds = rnd.sample(["a", "b", "c"], 2)
    return {"oneOf": [_object(kind={"const": kind}, value=random_schema(rnd, depth - 1)) for kind in kinds]}


_LEAVES: list[_Maker] = [
    _bounded_integer,
    _bounded_number,
    _bounded_string,
    _pattern,
    _format,
    _enum,
    _const,
    _plain,
]
_NESTED: list[_Maker] = [_random_array, _random_tuple, _random_object, _random_object, _any_of, _one_of]
