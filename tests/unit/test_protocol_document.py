"""docs/PROTOCOL.md names every message, field, section, body key and parameter that there is."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from procengine import messages
from procengine.config import LimitsConfig
from procengine.sampling_params import SamplingParams
from procengine.step_payload import EMBED_SECTIONS, RESULT_SECTIONS, STEP_SECTIONS, SlotList
from procengine.structured.spec import StructuredOutputs
from procengine.workflows.generate import GenerateBody

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "PROTOCOL.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("|")]


def tag_of(kind: type) -> str | None:
    return kind.__struct_config__.tag  # type: ignore[attr-defined,no-any-return]


MESSAGES = {
    tag: kind
    for name in messages.__all__
    if isinstance(kind := getattr(messages, name), type) and issubclass(kind, msgspec.Struct) and (tag := tag_of(kind))
}


def row_about(name: str) -> str:
    """The lines of tables whose first cell names `name`."""
    found = [row for row in ROWS if f"`{name}`" in row.split("|")[1]]
    assert found, f"no table has a row for {name}"
    return "\n".join(found)


@pytest.mark.parametrize("tag", MESSAGES)
def test_message_is_described_with_all_its_fields_in_order(tag: str) -> None:
    row = row_about(tag)
    at = [row.find(name, row.index("|", 1)) for name in MESSAGES[tag].__struct_fields__]
    assert -1 not in at and at == sorted(at), dict(zip(MESSAGES[tag].__struct_fields__, at, strict=True))


@pytest.mark.parametrize("section", [*STEP_SECTIONS, *RESULT_SECTIONS])
def test_section_is_described(section: str) -> None:
    assert row_about(section)


@pytest.mark.parametrize("sections", [STEP_SECTIONS, RESULT_SECTIONS, EMBED_SECTIONS], ids=["step", "result", "embed"])
def test_sections_are_described_in_order(sections: tuple[str, ...]) -> None:
    assert re.search(".*".join(f"`{section}`" for section in sections), TEXT, re.DOTALL)


def test_records_of_slots_are_described_by_number() -> None:
    names = {int(row.split("|")[1]): row.split("|")[2].strip() for row in ROWS if row.split("|")[1].strip().isdigit()}
    assert names == {kind.value: kind.name.lower().replace("_", " ") for kind in SlotList} | {2: "early stops"}


@pytest.mark.parametrize(
    "name",
    [
        *SamplingParams.__struct_fields__,
        *StructuredOutputs.__struct_fields__,
        *(set(GenerateBody.__struct_fields__) - {"prompt", "prompt_token_ids", "messages", "tools"}),
    ],
)
def test_key_of_a_body_is_described(name: str) -> None:
    assert row_about(name)


@pytest.mark.parametrize(
    ("parameter", "limits"),
    [
        ("n", ("max_n",)),
        ("stop", ("max_stop_strings", "max_stop_bytes")),
        ("stop_token_ids", ("max_stop_token_ids",)),
        ("bad_words", ("max_bad_words", "max_stop_bytes")),
        ("logit_bias", ("max_logit_bias",)),
        ("logprobs", ("max_logprobs",)),
        ("prompt_logprobs", ("max_logprobs",)),
        ("structured_outputs", ("max_grammar_bytes",)),
    ],
)
def test_limits_are_those_of_the_configuration(parameter: str, limits: tuple[str, ...]) -> None:
    (row,) = [row for row in row_about(parameter).splitlines() if "[" in row and len(row.split("|")) == 6]
    shown = re.findall(r"\d+", row.split("|")[3].rpartition("[")[2])
    assert shown == [str(getattr(LimitsConfig(), limit)) for limit in limits]
