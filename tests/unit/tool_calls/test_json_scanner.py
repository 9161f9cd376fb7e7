"""The scanner against the json module of the standard library."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procengine.tool_calls.json_scanner import WHITESPACE, JSONScanner


def scan(text: str) -> tuple[int, bool]:
    """How many characters were taken, and whether they are a value."""
    scanner = JSONScanner()
    taken = 0
    while taken < len(text) and scanner.push(text[taken]):
        taken += 1
    return taken, scanner.is_complete


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse_constant)
    except ValueError:
        return False
    return text[:1] not in WHITESPACE and text[-1:] not in WHITESPACE


PIECES = [
    *'{}[],:"\\ \n\t01-+.eEux/',
    "true",
    "false",
    "null",
    "NaN",
    '"a"',
    "\\u00e9",
    "\\ud800",
    "12",
    "é",
    "\x1f",
    '{"a":',
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_it_takes_what_json_takes(text: str) -> None:
    taken, is_complete = scan(text)
    assert (taken == len(text) and is_complete) == is_json(text)
    if is_complete:
        assert is_json(text[:taken])


VALUES = ['{"a": [1, -0.5e+3, {"b": null}], "c": "\\u00e9\\"\\\\"}', "[]", "-0", "10.25E-2", '""', "true", "[[], {}]"]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("after", ["", "}", ",", " ", "x", '"', "]"])
def test_a_value_ends_where_it_ends(value: str, after: str) -> None:
    assert scan(value + after) == (len(value), True)
    for cut in range(1, len(value)):
        assert scan(value[:cut])[0] == cut


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("{'a'", 1),
        ('{"a" 1', 5),
        ('{"a":1,}', 7),
        ("[1,]", 3),
        ("[1 2", 3),
        ("01", 1),
        ("[01", 2),
        ("-x", 1),
        ("[1.]", 3),
        ("[1e]", 3),
        ("truth", 3),
        ('"\n', 1),
        ('"\\x', 2),
        ('"\\u12g', 5),
        ("[}", 1),
        (" 1", 0),
        ("", 0),
        ("NaN", 0),
    ],
)
def test_it_stops_at_the_first_character_that_cannot_be(text: str, taken: int) -> None:
    assert scan(text)[0] == taken


def test_nesting_has_a_limit() -> None:
    assert scan("[" * 200 + "]" * 200) == (400, True)
    assert scan("[" * 201) == (200, False)
