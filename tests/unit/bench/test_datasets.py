"""Requests written down in files, and errors that name file, line and field."""

from __future__ import annotations

import re

import pytest

from procengine.bench.datasets import parse_jsonl, parse_prompts, parse_trace
from procengine.bench.workload import BenchRequest
from procengine.errors import ConfigError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_json_list_of_prompts() -> None:
    assert parse_prompts(b'["a", [1, 2]]', "p.json", 9) == [
        BenchRequest("a", 9, "p.json, prompt 0"),
        BenchRequest([1, 2], 9, "p.json, prompt 1"),
    ]


@pytest.mark.parametrize("data", [b"{}", b"[1]", b"nonsense", b"\xff"])
def test_json_of_another_shape_is_named(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"p\.json is no readable JSON list"):
        parse_prompts(data, "p.json", 9)


def test_jsonl_has_texts_ids_and_conversations() -> None:
    text = (
        '{"prompt": "a\u2028", "output_tokens": 3, "other": [1]}\n\n{"prompt_token_ids": [5, 6]}\n'
        '{"messages": [{"role": "user", "content": "ü"}]}'
    )
    assert parse_jsonl(text, "d.jsonl", 9) == [
        BenchRequest("a\u2028", 3, "d.jsonl line 1"),
        BenchRequest([5, 6], 9, "d.jsonl line 3"),
        BenchRequest([{"role": "user", "content": "ü"}], 9, "d.jsonl line 4"),
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "d.jsonl line 2: Input data was truncated"),
        ("[1]", "d.jsonl line 2: Expected `object`, got `array`"),
        ('{"prompt": 1}', "d.jsonl line 2: Expected `str | null`, got `int` - at `$.prompt`"),
        ('{"prompt_token_ids": ["a"]}', "d.jsonl line 2: Expected `int`, got `str` - at `$.prompt_token_ids"),
        ('{"text": "a"}', "line 2: exactly one of prompt, prompt_token_ids and messages must be given, got none"),
        ('{"prompt": "a", "messages": []}', "must be given, got prompt, messages"),
        ('{"prompt": ""}', "d.jsonl line 2: prompt: must not be empty"),
        ('{"prompt": "a", "output_tokens": 0}', "d.jsonl line 2: output_tokens: must be at least 1, got 0"),
    ],
)
def test_wrong_line_of_jsonl_is_named(line: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        parse_jsonl('{"prompt": "good"}\n' + line, "d.jsonl", 9)


def test_trace_of_2023_has_seven_digits_of_a_second() -> None:
    trace = parse_trace(
        HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-17 00:15:46.6805900,879,55\n",
        "code.csv",
    )
    assert trace.times_s == pytest.approx([0, 4.314579, 6 * 3600], abs=2e-6)
    assert trace.lengths == [(374, 44), (396, 109), (879, 55)]
    assert trace.origins == ["code.csv line 2", "code.csv line 3", "code.csv line 4"]


def test_trace_of_2024_has_zones_and_may_have_a_byte_order_mark_and_windows_lines() -> None:
    trace = parse_trace(
        "\ufeff" + HEADER.strip() + "\r\n2024-05-10 00:00:00.009930+00:00,2162,5\r\n2024-05-10 01:00:01+01:00,1,2\r\n",
        "t",
    )
    assert trace.times_s == pytest.approx([0, 0.99007])


def test_trace_may_have_seconds_and_more_columns_in_any_order() -> None:
    trace = parse_trace("id, GeneratedTokens ,TIMESTAMP,ContextTokens\nx,3,12.5,7\ny,4,11,8\n\n", "t")
    assert trace.times_s == [0, 1.5] and trace.lengths == [(8, 4), (7, 3)], "in order of time"
    assert trace.first(1).lengths == [(8, 4)] and trace.first(None) == trace
    assert (trace.only([False, True]).times_s, trace.only([False, True]).origins) == ([1.5], ["t line 2"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "t.csv line 1: there is no column TIMESTAMP, ContextTokens, GeneratedTokens; found: none"),
        ("TIMESTAMP,ContextTokens\n", "t.csv line 1: there is no column GeneratedTokens; found: TIMESTAMP, Context"),
        (HEADER, "t.csv: holds no request"),
        (HEADER + '"' + 200_000 * "x", "t.csv line 2: field larger than field limit"),
        (HEADER + "1,2\n", "t.csv line 2: has 2 columns, at least 3 were expected"),
        (HEADER + "1,2,3\nnoon,2,3\n", "t.csv line 3: TIMESTAMP: must be a date with time or a number of seconds"),
        (HEADER + "nan,2,3\n", "t.csv line 2: TIMESTAMP: must be a date"),
        (HEADER + "1,2,3\n2023-11-16 18:15:46,2,3\n", "t.csv line 3: TIMESTAMP: dates and seconds are mixed"),
        (HEADER + "1,-2,3\n", "t.csv line 2: ContextTokens: must be a whole number of tokens, got '-2'"),
        (HEADER + "1,2,3.5\n", "t.csv line 2: GeneratedTokens: must be a whole number of tokens, got '3.5'"),
    ],
)
def test_wrong_line_of_a_trace_is_named(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        parse_trace(text, "t.csv")


def test_lines_are_counted_as_an_editor_does() -> None:
    """A quoted field over two lines must not shift the numbers in later errors."""
    text = "note," + HEADER + '"two\nlines",1,2,3\nx,1,2,bad\n'
    with pytest.raises(ConfigError, match=re.escape("t.csv line 4: GeneratedTokens")):
        parse_trace(text, "t.csv")
