"""What a client may write in `structured_outputs`, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from procengine.errors import InvalidRequestError
from procengine.structured.spec import StructuredOutputs

GOOD: list[dict[str, Any]] = [
    {"json_schema": {}},
    {"json_schema": '{"type": "string"}'},
    {"json_object": True},
    {"json_object": True, "disable_any_whitespace": True},
    {"json_schema": {"type": "string"}, "whitespace_pattern": " ?"},
    {"regex": ""},
    {"choice": ["a", "b"]},
    {"grammar": "start: /a/"},
    {"regex": "a", "json_object": False, "grammar": None},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_one_form_is_taken_and_survives_the_wire(fields: dict[str, Any]) -> None:
    spec = msgspec.convert(fields, StructuredOutputs)
    assert spec.kind == next(name for name, value in fields.items() if value not in (None, False))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=StructuredOutputs) == spec
    assert StructuredOutputs(**fields).kind == spec.kind


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "structured_outputs: give exactly one of json_schema, .*; got none"),
    ({"json_object": False}, "got none"),
    ({"regex": "a", "choice": ("a",)}, "got regex and choice"),
    ({"json_object": 1}, "json_object: must be true or false, got 1"),
    ({"regex": 5}, "regex: must be a string, got 5"),
    ({"grammar": b"x"}, "grammar: must be a string"),
    ({"json_schema": [1]}, "json_schema: must be an object or its JSON text"),
    ({"choice": ()}, "choice: must be a list of at least one string"),
    ({"choice": "ab"}, "choice: must be a list"),
    ({"choice": ("a", "")}, "choice: every choice must be a non-empty string, got ''"),
    ({"choice": (1,)}, "choice: every choice must be a non-empty string, got 1"),
    (
        {"regex": "a", "whitespace_pattern": " "},
        "whitespace_pattern: belongs to json_schema and json_object, not to regex",
    ),
    ({"choice": ("a",), "disable_any_whitespace": True}, "disable_any_whitespace: belongs to"),
    ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "whitespace_pattern: cannot be"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=str)
def test_anything_else_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutputs(**fields)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `json`"):
        msgspec.convert({"json": {}}, StructuredOutputs)


def test_import_loads_neither_llguidance_nor_torch() -> None:
    code = "import sys, procengine.structured\nprint(*sorted({'llguidance', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_compiling_loads_llguidance_and_not_torch() -> None:
    code = """
import sys
from procengine.structured.compiler import GrammarCompiler
from procengine.structured.spec import StructuredOutputs
from tests.tiny_tokenizers import byte_level
GrammarCompiler(byte_level().backend.to_str(), [279]).compile(StructuredOutputs(json_object=True))
print(*sorted({'llguidance', 'torch', 'transformers'} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "llguidance"
