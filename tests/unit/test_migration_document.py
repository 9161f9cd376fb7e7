"""docs/MIGRATING_FROM_VLLM.md: each name of ours in its tables exists, and what is said not to be there is not."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from procengine.api.chat_request import ChatRequest
from procengine.cli.completion_tree import nodes_of, read_tree
from procengine.cli.main import whole_parser
from procengine.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "MIGRATING_FROM_VLLM.md").read_text()


def rows_behind(heading: str) -> list[tuple[str, str]]:
    """vLLM's name and our column, of the table in this section."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section, flags=re.M)


def fields_of(struct: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(struct)}


def flags_of_serve() -> set[str]:
    (serve,) = (node for node in nodes_of(read_tree(whole_parser())) if node.path == ("serve",))
    return {name for flag in serve.flags for name in flag.names}


def metrics() -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "OBSERVABILITY.md").read_text(), flags=re.M))


TABLES = {
    "Flags of `vllm serve`": flags_of_serve(),
    "`SamplingParams`": fields_of(SamplingParams),
    "HTTP": fields_of(ChatRequest),
    "Metrics": metrics(),
}
ROWS = [(heading, *row) for heading in TABLES for row in rows_behind(heading)]


@pytest.mark.parametrize(("heading", "theirs", "ours"), ROWS, ids=[row[1] for row in ROWS])
def test_row_is_true(heading: str, theirs: str, ours: str) -> None:
    exist = TABLES[heading]
    if ours == "same":
        assert theirs in exist
    elif ours == "not there":
        assert theirs not in exist
    elif ours != "MODEL":
        assert ours.strip("`") in exist
        assert theirs not in exist, "it has another name"


def test_every_parameter_of_ours_is_in_its_table() -> None:
    assert fields_of(SamplingParams) <= {theirs for theirs, _ in rows_behind("`SamplingParams`")}


def test_every_flag_in_the_text_exists() -> None:
    text = re.sub(r"^\| `--[^`]+` \|", "", TEXT, flags=re.M)  # vLLM's
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) <= flags_of_serve() | {"--effective"}


def test_tables_are_long_enough_to_be_of_use() -> None:
    lengths = [len(rows_behind(heading)) for heading in TABLES]
    assert all(length >= least for length, least in zip(lengths, (60, 30, 10, 12), strict=True)), lengths
