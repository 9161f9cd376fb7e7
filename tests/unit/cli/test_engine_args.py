"""Engine options as flags: all of them, by type, without being written twice."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
import pytest

from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.engine_args import EngineArgs


def parse(*argv: str) -> EngineArgs:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_args_from(parser.parse_args(["m", *argv]))


def test_no_flag_gives_the_defaults() -> None:
    assert parse() == EngineArgs(model="m")


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--max-num-seqs", "8"], "max_num_seqs", 8),
        (["--num-blocks", "9"], "num_blocks", 9),
        (["--device", "mock"], "device", "mock"),
        (["--mock-step-ms", "1.5"], "mock_step_ms", 1.5),
        (["--name", "x"], "name", "x"),
        (["--logits-processors", "a:b", "--logits-processors", "c:d"], "logits_processors", ("a:b", "c:d")),
        ([], "logits_processors", ()),
        (["--max-n", "3"], "max_n", 3),
        (["--grammar-timeout", "0.5"], "grammar_timeout", 0.5),
        (["--metrics-port", "0"], "metrics_port", 0),
        (["--otlp-endpoint", "http://x"], "otlp_endpoint", "http://x"),
        (["--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
    ],
)
def test_flag_sets_its_field(argv: list[str], field: str, value: Any) -> None:
    assert parse(*argv) == msgspec.structs.replace(EngineArgs(model="m"), **{field: value})


@pytest.mark.parametrize("argv", [["--device", "tpu"], ["--workers", "two"], ["--no-such-flag"]])
def test_wrong_flag_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(*argv)
    assert argv[0] in capsys.readouterr().err


def test_private_group_takes_a_default_name_unless_one_is_given() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert engine_args_from(parser.parse_args(["m"]), default_name="bench-1").name == "bench-1"
    assert engine_args_from(parser.parse_args(["m", "--name", "x"]), default_name="bench-1").name == "x"
