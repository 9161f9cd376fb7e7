"""Requests written down in files. Pure: the text of a file in, requests out; errors name the file, line and field.

Owns: the formats. Never does: open a file, or decide when a request is sent.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import compress
from typing import Any

import msgspec

from procengine.bench.workload import BenchRequest
from procengine.errors import ConfigError

__all__ = ["Trace", "parse_jsonl", "parse_prompts", "parse_trace"]

_TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Trace:
    """What was asked of a service, and when.

    Attributes:
        times_s: seconds from the first request on, ascending.
        lengths: (tokens of the prompt, tokens of the answer).
        origins: file and line of each.
    """

    times_s: list[float]
    lengths: list[tuple[int, int]]
    origins: list[str]

    def first(self, count: int | None) -> Trace:
        """The first `count` requests; None is all."""
        return Trace(self.times_s[:count], self.lengths[:count], self.origins[:count])

    def only(self, keeps: Sequence[bool]) -> Trace:
        """The requests for which `keeps` is true, at the times they had."""
        return Trace(*(list(compress(values, keeps)) for values in (self.times_s, self.lengths, self.origins)))  # type: ignore[arg-type]


class _Line(msgspec.Struct):
    """A line of a JSONL data set; other fields are not looked at."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    output_tokens: int | None = None


def parse_prompts(data: bytes, name: str, output_len: int) -> list[BenchRequest]:
    """A JSON list of texts or token id lists.

    Raises:
        ConfigError: it is something else.
    """
    try:
        prompts = msgspec.json.decode(data, type=list[str | list[int]])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name} is no readable JSON list of texts or token id lists ({error})") from error
    return [BenchRequest(prompt, output_len, f"{name}, prompt {at}") for at, prompt in enumerate(prompts)]


def parse_jsonl(text: str, name: str, output_len: int) -> list[BenchRequest]:
    """One JSON object a line: `prompt`, `prompt_token_ids` or `messages`, and `output_tokens` (else `output_len`).

    Raises:
        ConfigError: a line is something else; names it.
    """
    requests: list[BenchRequest] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            requests.append(_jsonl_request(line, f"{name} line {number}", output_len))
    return requests


def _jsonl_request(line: str, origin: str, output_len: int) -> BenchRequest:
    try:
        values = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{origin}: {error}") from error
    given = [field for field in ("prompt", "prompt_token_ids", "messages") if getattr(values, field) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{origin}: exactly one of prompt, prompt_token_ids and messages must be given, "
            f"got {', '.join(given) or 'none'}"
        )
    prompt = getattr(values, given[0])
    if not prompt:
        raise ConfigError(f"{origin}: {given[0]}: must not be empty")
    max_tokens = output_len if values.output_tokens is None else values.output_tokens
    if max_tokens < 1:
        raise ConfigError(f"{origin}: output_tokens: must be at least 1, got {max_tokens}")
    return BenchRequest(prompt, max_tokens, origin)


def parse_trace(text: str, name: str) -> Trace:
    """A CSV with the columns of the Azure LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens.

    A TIMESTAMP is a date with time, as in those traces, or a number of seconds. Rows may be in any order; columns that
    are not named here are not looked at. Counts of 0 are taken as they are: `workload.misfit` finds them.

    Raises:
        ConfigError: a column is missing, or a value is no time or count; names line and column.
    """
    lines = _csv_lines(text.removeprefix("\ufeff"), name)
    columns = _trace_columns(next(lines, (1, []))[1], name)
    rows = sorted(_trace_rows(lines, columns, name), key=lambda row: row[0])
    if not rows:
        raise ConfigError(f"{name}: holds no request")
    begin_s = rows[0][0]
    return Trace([row[0] - begin_s for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def _csv_lines(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """(number of the last line it is on, cells) of each row that is not empty."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise ConfigError(f"{name} line {reader.line_num}: {error}") from error


def _trace_columns(header: Sequence[str], name: str) -> list[int]:
    names = [column.strip() for column in header]
    missing = [column for column in _TRACE_COLUMNS if column not in names]
    if missing:
        raise ConfigError(
            f"{name} line 1: there is no column {', '.join(missing)}; found: {', '.join(names) or 'none'}"
        )
    return [names.index(column) for column in _TRACE_COLUMNS]


def _trace_rows(
    lines: Iterator[tuple[int, list[str]]], columns: Sequence[int], name: str
) -> Iterator[tuple[float, tuple[int, int], str]]:
    kind: bool | None = None
    for number, cells in lines:
        origin = f"{name} line {number}"
        if len(cells) <= max(columns):
            raise ConfigError(f"{origin}: has {len(cells)} columns, at least {max(columns) + 1} were expected")
        stamp, context, generated = (cells[column].strip() for column in columns)
        time_s, has_date = _seconds(stamp, origin)
        if kind is not None and kind != has_date:
            raise ConfigError(f"{origin}: TIMESTAMP: dates and seconds are mixed, got {stamp!r}")
        kind = has_date
        yield time_s, (_count(context, "ContextTokens", origin), _count(generated, "GeneratedTokens", origin)), origin


def _seconds(stamp: str, origin: str) -> tuple[float, bool]:
    """The time in seconds, and whether it was a date. A date without a zone is read as UTC: only differences count."""
    readings: tuple[tuple[Callable[[str], float], bool], ...] = ((float, False), (_date_seconds, True))
    for read, has_date in readings:
        try:
            time_s = read(stamp)
        except ValueError:
            continue
        if math.isfinite(time_s):
            return time_s, has_date
    raise ConfigError(f"{origin}: TIMESTAMP: must be a date with time or a number of seconds, got {stamp!r}")


def _date_seconds(stamp: str) -> float:
    date = datetime.fromisoformat(stamp)
    zoned = date if date.tzinfo is not None else datetime.fromisoformat(stamp + "+00:00")
    return zoned.timestamp()


def _count(text: str, column: str, origin: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{origin}: {column}: must be a whole number of tokens, got {text!r}")
    return int(text)
