"""The options of a group as flags, derived from the table in `procengine.engine_args`, so that none is written twice.

Owns: how a flag looks, and which flags were given. Never does: decide or check a value (`resolve` does).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from procengine.engine_args import OPTIONS, EngineArgs
from procengine.errors import ConfigError
from procengine.option import Option
from procengine.option_sources import Setting, engine_args_of, layer

__all__ = ["add_engine_arguments", "engine_args_from", "given_flags", "settings_from"]

_NO_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType({})


def add_engine_arguments(
    parser: argparse.ArgumentParser, *, mentions_model: bool = True, demands_model: bool = True
) -> None:
    """Add MODEL (unless the command adds it itself), `--config`, and one flag for each other option.

    What is not given is not in the parsed namespace at all: it may come from elsewhere.
    """
    if mentions_model:
        words: dict[str, Any] = {} if demands_model else {"nargs": "?", "default": argparse.SUPPRESS}
        parser.add_argument("model", metavar="MODEL", help=OPTIONS["model"].about.help, **words)
    file = parser.add_argument_group("options from elsewhere")
    file.add_argument(
        "--config", dest="config_file", type=Path, metavar="FILE", help="a TOML file with options, such as port = 8000"
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in OPTIONS.values():
        if option.name != "model":
            section = option.about.section
            _add_flag(groups.setdefault(section, parser.add_argument_group(section)), option)


def settings_from(args: argparse.Namespace, environ: Mapping[str, str] = _NO_ENVIRONMENT) -> dict[str, Setting]:
    """Every option with its source.

    Raises:
        ConfigError: the file or a variable is wrong.
    """
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name, None) is not None}
    given |= {name: None for name in OPTIONS if name != "model" and getattr(args, name, False) is None}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return layer(values, args.config_file, environ)


def engine_args_from(
    args: argparse.Namespace, *, default_name: str | None = None, environ: Mapping[str, str] = _NO_ENVIRONMENT
) -> EngineArgs:
    """The options. A private group gets `default_name`, so that it does not take the name of a served one.

    Raises:
        ConfigError: the file or a variable is wrong, or nobody named a model.
    """
    settings = settings_from(args, environ)
    if default_name is not None and settings["name"].value is None:
        settings["name"] = Setting(default_name, "default")
    return engine_args_of(settings)


def given_flags(args: argparse.Namespace) -> list[str]:
    """The flags of this module that are on the command line: they make no sense where no group is launched."""
    given = [option.flag for name, option in OPTIONS.items() if name != "model" and hasattr(args, name)]
    return given if args.config_file is None else ["--config", *given]


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    words: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{option.about.help} [{option.shown_default}]"}
    if option.kind is bool:
        words |= {"action": argparse.BooleanOptionalAction}
    elif option.choices:
        words |= {"choices": option.choices}
    else:
        words |= {"type": _type_of(option), "metavar": option.metavar}
    if option.is_list:
        words |= {"action": "append", "help": words["help"] + " (may be given several times)"}
    group.add_argument(option.flag, **{key: _escaped(value) for key, value in words.items()})


def _escaped(value: Any) -> Any:
    return value.replace("%", "%%") if isinstance(value, str) and value is not argparse.SUPPRESS else value


def _type_of(option: Option) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"{error}") from error

    return parse
