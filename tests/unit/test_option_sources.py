"""Options from four places: each option can be set in each of them, and the nearer place wins."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from procengine.cli.config import template
from procengine.cli.engine_args import add_engine_arguments, settings_from
from procengine.engine_args import OPTIONS, EngineArgs, check_ranges
from procengine.errors import ConfigError
from procengine.option import Option
from procengine.option_sources import Setting, engine_args_of, layer, read_config_file, unknown_variables


def other_values(option: Option) -> list[Any]:
    """Three values that differ from the default and from each other, as far as the type has so many."""
    if option.is_list:
        return [("a",), ("b", "c"), ("d",)]
    if option.kind is bool:
        return [not option.default, bool(option.default), not option.default]
    if option.choices:
        return [*[choice for choice in option.choices if choice != option.default], option.default, *option.choices][:3]
    if option.kind is str:
        return ["one", "two", "three"]
    start = 64 if option.name == "span_records" else max(option.about.low or 0, 1)
    return [option.kind(start * factor) for factor in (1, 2, 4)]


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser, demands_model=False)
    return parser.parse_args(argv)


def on_command_line(option: Option, value: Any) -> list[str]:
    if option.name == "model":
        return [str(value)]
    if option.kind is bool:
        return [option.flag if value else option.flag.replace("--", "--no-", 1)]
    items = value if option.is_list else (value,)
    return [word for item in items for word in (option.flag, str(item))]


def in_environment(option: Option, value: Any) -> dict[str, str]:
    return {option.variable: msgspec.json.encode(value).decode() if option.is_list else str(value).lower()}


def in_file(path: Path, option: Option, value: Any) -> Path:
    path.write_text(f"{option.name} = {msgspec.json.encode(value).decode()}\n")
    return path


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_every_option_can_be_set_in_every_place_and_the_nearer_place_wins(option: Option, tmp_path: Path) -> None:
    of_file, of_environment, of_line = other_values(option)
    file = in_file(tmp_path / "options.toml", option, of_file)
    environ = in_environment(option, of_environment)
    argv = on_command_line(option, of_line)

    def setting(*line: str, variables: dict[str, str]) -> Setting | None:
        return settings_from(parsed(*line), variables).get(option.name)

    default = None if option.default is msgspec.NODEFAULT else Setting(option.default, "default")
    assert setting(variables={}) == default
    assert setting("--config", str(file), variables={}) == Setting(of_file, "file", str(file))
    assert setting(variables={"PROCENGINE_CONFIG": str(file)}) == Setting(of_file, "file", str(file))
    assert setting("--config", str(file), variables=environ) == Setting(of_environment, "environment", option.variable)
    everything = setting("--config", str(file), *argv, variables=environ)
    assert everything == Setting(of_line, "command line", option.flag)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_every_option_says_what_it_is(option: Option) -> None:
    assert option.about.help
    assert option.default is msgspec.NODEFAULT or option.shown_default
    if option.kind in (int, float):
        assert option.about.low is not None, "a number has a range"


def test_defaults_are_the_table_s() -> None:
    settings = layer({"model": "m"}, None, {})
    assert engine_args_of(settings) == EngineArgs(model="m")
    assert {one.source for name, one in settings.items() if name != "model"} == {"default"}


def test_template_without_its_comment_signs_is_the_defaults(tmp_path: Path) -> None:
    lines = template().splitlines()
    path = tmp_path / "all.toml"
    path.write_text("\n".join(line.removeprefix("# ") for line in lines if " = " in line and line.startswith("# ")))
    assert read_config_file(path).keys() == OPTIONS.keys()
    args = engine_args_of(layer({"model": "m"}, path, {}))
    assert args == EngineArgs(model="m")
    check_ranges(args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq = 3", "max_num_seq: no such option; did you mean max_num_seqs?"),
        ("max-num-seq = 3", "max-num-seq: no such option; did you mean max_num_seqs?"),
        ("zzz = 3", "zzz: no such option"),
        (
            "[scheduler]\nmax_num_seqs = 3",
            r"scheduler: no such option.* \(options stand at the top level",
        ),
        ("max_num_seqs = 3\nmax-num-seqs = 4", "max_num_seqs: stands there twice"),
        ("max_num_seqs = '3'", "max_num_seqs: must be a whole number, got '3'"),
        ("max_num_seqs = true", "max_num_seqs: must be a whole number, got True"),
        ("max_num_seqs = 3.0", "max_num_seqs: must be a whole number, got 3.0"),
        ("redact_prompts = 1", "redact_prompts: must be true or false, got 1"),
        ("device = 'gpu'", "device: must be one of auto, cpu, cuda, mock, got 'gpu'"),
        ("api_key = [1]", r"api_key: must be a text or a list of texts, got \[1\]"),
        ("port = ", "cannot be read"),
    ],
)
def test_wrong_file_is_an_error_that_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"wrong.toml: {message}"):
        layer({}, path, {})


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: "):
        layer({}, tmp_path / "none.toml", {})


def test_flags_may_be_written_as_keys_with_dashes_and_whole_numbers_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text("max-num-seqs = 3\nrequest_timeout = 60\napi_key = 'k'\n")
    assert read_config_file(path) == {"max_num_seqs": 3, "request_timeout": 60.0, "api_key": ("k",)}


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("PROCENGINE_WORKERS", "two", "PROCENGINE_WORKERS: workers: must be a whole number, got 'two'"),
        ("PROCENGINE_REDACT_PROMPTS", "maybe", "PROCENGINE_REDACT_PROMPTS: redact_prompts: must be true or false"),
        ("PROCENGINE_DTYPE", "int8", "must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ("PROCENGINE_API_KEY", '["a"', "must be a text or a JSON list of texts"),
        ("PROCENGINE_PORT", "tcp://10.0.0.7:8000", "Kubernetes sets this variable .* `enableServiceLinks: false`"),
    ],
)
def test_wrong_variable_is_an_error_that_names_it(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layer({}, None, {variable: text})


def test_value_that_is_set_can_be_taken_back_by_the_nearer_place(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text("request_timeout = 60\nnum_blocks = 10\nport = 8000\nname = 'x'\n")
    environ = {"PROCENGINE_NUM_BLOCKS": "auto", "PROCENGINE_PORT": ""}
    settings = settings_from(parsed("--config", str(path), "--request-timeout", "off"), environ)
    assert settings["request_timeout"] == Setting(None, "command line", "--request-timeout")
    assert settings["num_blocks"] == Setting(None, "environment", "PROCENGINE_NUM_BLOCKS")
    assert settings["port"].value == 8000, "an empty variable counts as not set"


def test_key_with_commas_is_one_key() -> None:
    assert layer({}, None, {"PROCENGINE_API_KEY": "a,b c"})["api_key"].value == ("a,b c",)


def test_model_must_come_from_somewhere() -> None:
    assert engine_args_of(layer({}, None, {"PROCENGINE_MODEL": "m"})).model == "m"
    with pytest.raises(ConfigError, match=r"model: none is given; .* PROCENGINE_MODEL"):
        engine_args_of(layer({}, None, {}))


def test_variables_that_are_no_options_are_named_with_what_was_meant() -> None:
    environ = {
        "PROCENGINE_MAX_NUM_SEQ": "3",
        "PROCENGINE_HOME": "/x",
        "PROCENGINE_RUN_DIR": "/y",
        "PROCENGINE_CONFIG": "f",
        "PROCENGINE_PORT": "1",
        "PROCENGINE_SERVICE_HOST": "10.0.0.7",
        "PROCENGINE_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "PATH": "/bin",
    }
    assert unknown_variables(environ) == ["PROCENGINE_MAX_NUM_SEQ is no option; did you mean PROCENGINE_MAX_NUM_SEQS?"]
