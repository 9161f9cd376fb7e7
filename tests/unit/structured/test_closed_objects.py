"""Objects get the properties that are named, unless the schema asks for others or closing could forbid too much."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import jsonschema
import pytest

from procengine.structured.closed_objects import close_objects

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}
CLOSED_A, CLOSED_B = ({**one, "additionalProperties": False} for one in (A, B))


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    copy = deepcopy(schema)
    close_objects(copy)
    return copy


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"prefixItems": [A, B]}, {"prefixItems": [CLOSED_A, CLOSED_B]}),
        ({"anyOf": [A, B, {"type": "null"}]}, {"anyOf": [CLOSED_A, CLOSED_B, {"type": "null"}]}),
        ({"$defs": {"a": A}, "$ref": "#/$defs/a"}, {"$defs": {"a": CLOSED_A}, "$ref": "#/$defs/a"}),
        ({"additionalProperties": A}, {"additionalProperties": CLOSED_A}),
        ({"properties": {"not": A}}, {"properties": {"not": CLOSED_A}, "additionalProperties": False}),
    ],
    ids=str,
)
def test_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "minProperties": 2},
        {**A, "required": ["a", "b"]},
        {**A, "const": {"a": 1, "b": 2}},
        {"allOf": [A, B]},
        {"oneOf": [A, B]},
        {"not": A},
        {"$defs": {"a": A, "b": {"allOf": [{"$ref": "#/$defs/a"}, B]}}, "$ref": "#/$defs/b"},
        {**A, "anyOf": [B, {"properties": {"c": {}}}]},
        {"$defs": {"b": B}, "$ref": "#/$defs/b", "required": ["c"]},
        {"default": A, "examples": [B]},
        {"properties": 5},
        {"properties": {"a": {}}, "required": 5},
    ],
    ids=str,
)
def test_left_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_what_a_closed_schema_takes_the_open_one_takes() -> None:
    schema = {"$defs": {"n": {**A, "required": ["a"]}}, "properties": {"x": {"anyOf": [{"$ref": "#/$defs/n"}, B]}}}
    for text in ('{"x": {"a": 1}}', '{"x": {"b": 2}}', "{}", '{"x": {}}', '{"x": {"a": 1, "c": 2}}', '{"y": 1}'):
        if jsonschema.Draft202012Validator(closed(schema)).is_valid(json.loads(text)):
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
