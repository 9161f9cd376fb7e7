"""Two hundred JSON schemas on the real model at temperature 1: what ends, validates; free rows beside notice nothing.

The schemas bound their documents, so that almost all of them come to an end within the tokens they have.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from procengine import RequestOutput, SamplingParams
from procengine.structured.spec import StructuredOutputs
from tests.e2e.running_group import RunningGroup
from tests.e2e.smollm2 import P1, P2, P3, P4, SMOLLM2_OPTIONS, greedy
from tests.unit.structured.schemas import SCHEMAS, random_schema

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]

_MAX_TOKENS = 160
_BATCH = 32
# Documents of these have no bound, so a model at temperature 1 need not come to an end.
_ENDLESS = {"anything", "any_object", "any_array", "string", "number", "min_length", "recursive", "recursive_tree"}
_ENDLESS |= {"nested_arrays", "map", "open_object", "pattern_properties", "pattern_anywhere", "email", "items"}
_ENDLESS |= {"integer", "minimum", "maximum", "multiple_of_minutes", "multiple_of_cents", "any_of", "tuple"}
_ENDLESS |= {"tuple_with_rest", "array_of_objects", "optional_properties", "any_of_objects", "one_of", "flat_object"}


def two_hundred_schemas() -> list[dict[str, Any]]:
    fixed = [schema for name, schema in SCHEMAS.items() if name not in _ENDLESS]
    rnd = random.Random(200)
    return fixed + [random_schema(rnd) for _ in range(200 - len(fixed))]


def strict_json(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def expect_valid(schema: dict[str, Any], text: str) -> None:
    """Formats as well, but for dates: 0000-01-01 is one for JSON Schema (RFC 3339), not for the checker (Python)."""
    checker = jsonschema.FormatChecker(["uuid", "ipv4"])
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(strict_json(text))


def constrained(schema: dict[str, Any], seed: int) -> SamplingParams:
    spec = StructuredOutputs(json_schema=schema, disable_any_whitespace=bool(seed % 4))
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=_MAX_TOKENS, structured_outputs=spec)


def prompt_of(schema: dict[str, Any]) -> str:
    return f"A short JSON document for the schema {json.dumps(schema)[:200]}:\n"


def run_schemas(
    group: RunningGroup, schemas: Sequence[dict[str, Any]], prompts: Sequence[str], params: Sequence[SamplingParams]
) -> tuple[list[RequestOutput], list[list[list[int]]]]:
    """All schemas in batches, with these free rows in each; the results, and the free rows' tokens batch by batch."""
    found: list[RequestOutput] = []
    free: list[list[list[int]]] = []
    for start in range(0, len(schemas), _BATCH):
        batch = schemas[start : start + _BATCH]
        asked = [constrained(schema, start + at) for at, schema in enumerate(batch)]
        outputs = group.generate([*prompts, *map(prompt_of, batch)], [*params, *asked])
        free.append([output.outputs[0].token_ids for output in outputs[: len(prompts)]])
        found += outputs[len(prompts) :]
    return found, free


def check_valid(schemas: Sequence[dict[str, Any]], outputs: Sequence[RequestOutput]) -> None:
    unfinished: list[tuple[dict[str, Any], str]] = []
    for schema, output in zip(schemas, outputs, strict=True):
        (choice,) = output.outputs
        assert choice.finish_reason in ("stop", "length"), (schema, choice)
        if choice.finish_reason == "stop":
            expect_valid(schema, choice.text)
        else:
            unfinished.append((schema, choice.text))
    print(f"{len(schemas) - len(unfinished)} of {len(schemas)} finished")
    assert len(unfinished) <= 0.05 * len(schemas), unfinished


@pytest.fixture(scope="module")
def bfloat16(smollm2_gguf: Path) -> Iterator[RunningGroup]:
    with RunningGroup(smollm2_gguf, **(SMOLLM2_OPTIONS | {"dtype": "bfloat16"})) as group:
        yield group


def test_two_hundred_schemas_validate_beside_free_rows(bfloat16: RunningGroup) -> None:
    """The free rows' best tokens are far ahead of the others: bfloat16 rounds by the shape of a batch."""
    schemas = two_hundred_schemas()
    assert len(schemas) == 200
    prompts = [P1, P2, P3, P4]
    params = [greedy(len(prompt.token_ids)) for prompt in prompts]
    outputs, free = run_schemas(bfloat16, schemas, [prompt.text for prompt in prompts], params)
    check_valid(schemas, outputs)
    assert free == [[prompt.token_ids for prompt in prompts]] * len(free)


def test_seeded_free_rows_draw_what_they_draw_alone(smollm2: RunningGroup) -> None:
    """In float32; and streams of constrained rows join to what comes without one."""
    schemas = two_hundred_schemas()[-40:]
    prompts = [P1.text, P2.text, P4.text]
    penalties: list[dict[str, Any]] = [{}, {"top_p": 0.9, "frequency_penalty": 0.5}, {"repetition_penalty": 1.2}]
    params = [
        SamplingParams(seed=at, temperature=1.0, max_tokens=24, ignore_eos=True, **fields)
        for at, fields in enumerate(penalties)
    ]
    alone = [
        smollm2.generate([prompt], of_one, cache_salt=smollm2.new_salt())[0].outputs[0].token_ids
        for prompt, of_one in zip(prompts, params, strict=True)
    ]
    outputs, free = run_schemas(smollm2, schemas, prompts, params)
    check_valid(schemas, outputs)
    assert free == [alone] * len(free)
    for at in range(4):
        whole = outputs[at].outputs[0]
        deltas = list(smollm2.client.stream(prompt_of(schemas[at]), constrained(schemas[at], at)))
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
