"""Sampling parameters as flags: all of them, from one table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from procengine.cli.sampling_args import _HELP, _STRUCTURED, add_sampling_arguments, sampling_params_from
from procengine.errors import InvalidRequestError
from procengine.sampling_params import SamplingParams
from procengine.structured.spec import StructuredOutputs


def parse(*argv: str, max_tokens: int | None = 16, without: tuple[str, ...] = ()) -> SamplingParams:
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser, temperature=1.0, max_tokens=max_tokens, without=without)
    return sampling_params_from(parser.parse_args(argv))


def test_no_flag_gives_the_defaults() -> None:
    assert parse() == SamplingParams()
    assert parse(max_tokens=None).max_tokens is None


def test_every_parameter_has_a_flag_and_every_flag_a_parameter() -> None:
    assert {*_HELP, "structured_outputs", "output_kind"} == set(SamplingParams.__struct_fields__)
    fields = {field for field, _, _ in _STRUCTURED.values()}
    assert fields == set(StructuredOutputs.__struct_fields__) - {"disable_any_whitespace", "whitespace_pattern"}


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--n", "3"], "n", 3),
        (["--max-tokens", "5"], "max_tokens", 5),
        (["--min-tokens", "2"], "min_tokens", 2),
        (["--temperature", "0.5"], "temperature", 0.5),
        (["--top-p", "0.5"], "top_p", 0.5),
        (["--top-k", "-1"], "top_k", -1),
        (["--min-p", "0.1"], "min_p", 0.1),
        (["--presence-penalty", "-0.5"], "presence_penalty", -0.5),
        (["--frequency-penalty", "0.5"], "frequency_penalty", 0.5),
        (["--repetition-penalty", "1.3"], "repetition_penalty", 1.3),
        (["--seed", "-7"], "seed", -7),
        (["--stop", "a b", "--stop", "c"], "stop", ("a b", "c")),
        (["--stop-token-ids", "2,3"], "stop_token_ids", (2, 3)),
        (["--bad-words", "a", "--bad-words", "b"], "bad_words", ("a", "b")),
        (["--logit-bias", '{"7": -1, "8": 2.5}'], "logit_bias", {7: -1.0, 8: 2.5}),
        (["--allowed-token-ids", "5"], "allowed_token_ids", (5,)),
        (["--include-stop-str-in-output"], "include_stop_str_in_output", True),
        (["--ignore-eos"], "ignore_eos", True),
        (["--logprobs", "0"], "logprobs", 0),
        (["--prompt-logprobs", "2"], "prompt_logprobs", 2),
        (["--no-detokenize"], "detokenize", False),
        (["--no-skip-special-tokens"], "skip_special_tokens", False),
        (["--no-spaces-between-special-tokens"], "spaces_between_special_tokens", False),
        (["--truncate-prompt-tokens", "-1"], "truncate_prompt_tokens", -1),
        (["--stream-interval", "4"], "stream_interval", 4),
        (["--regex", "a+"], "structured_outputs", StructuredOutputs(regex="a+")),
        (["--choice", "a", "--choice", "b"], "structured_outputs", StructuredOutputs(choice=("a", "b"))),
        (["--json-object"], "structured_outputs", StructuredOutputs(json_object=True)),
    ],
)
def test_flag_sets_its_parameter(argv: list[str], field: str, value: Any) -> None:
    assert parse(*argv) == SamplingParams(**{field: value})


@pytest.mark.parametrize(("flag", "field"), [("--json-schema", "json_schema"), ("--grammar", "grammar")])
def test_schemas_and_grammars_are_read_from_files(flag: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "é.txt"
    path.write_text('{"type": "é"}', encoding="utf-8")
    expected: dict[str, Any] = {field: path.read_text(encoding="utf-8")}
    assert parse(flag, str(path)).structured_outputs == StructuredOutputs(**expected)


@pytest.mark.parametrize(
    "argv",
    [
        ["--logit-bias", "{"],
        ["--logit-bias", '{"a": 1}'],
        ["--logit-bias", '{"7": NaN}'],
        ["--logit-bias", "[7]"],
        ["--stop-token-ids", "2,x"],
        ["--stop-token-ids", ""],
        ["--n", "1.5"],
    ],
)
def test_wrong_value_is_refused_by_its_flag(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(*argv)
    assert f"argument {argv[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "field"),
    [(["--n", "0"], "n"), (["--temperature", "nan"], "temperature"), (["--logit-bias", '{"7": 101}'], "logit_bias")],
)
def test_value_out_of_range_is_refused_by_its_name(argv: list[str], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}\b"):
        parse(*argv)


def test_command_may_leave_parameters_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--top-k", "3", without=("n",)) == SamplingParams(top_k=3)
    with pytest.raises(SystemExit, match="2"):
        parse("--n", "2", without=("n",))
    assert "--n" in capsys.readouterr().err
