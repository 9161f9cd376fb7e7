"""Where the options of a group come from: command line > environment > file > default.

Owns: reading a file and the environment, and who wins. Never does: know an option's name or type (`engine_args` does).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from procengine.engine_args import OPTIONS, EngineArgs, nearest_option
from procengine.errors import ConfigError

__all__ = ["CONFIG_VARIABLE", "Setting", "engine_args_of", "layer", "read_config_file", "unknown_variables"]

CONFIG_VARIABLE: Final = "PROCENGINE_CONFIG"
_PREFIX: Final = "PROCENGINE_"
_PLACES: Final = frozenset({"PROCENGINE_HOME", "PROCENGINE_RUN_DIR", CONFIG_VARIABLE})  # `paths` reads the first two
_KUBERNETES: Final = re.compile(r"PROCENGINE_(SERVICE|PORT)_")  # which it sets for a service named procengine


class Setting(NamedTuple):
    """An option's value and who set it; `where` says it more closely: a file, a variable, a flag."""

    value: Any
    source: Literal["default", "file", "environment", "command line"]
    where: str = ""


def layer(given: Mapping[str, Any], file: Path | None, environ: Mapping[str, str]) -> dict[str, Setting]:
    """Every option that is set or has a default, in the table's order.

    Args:
        given: values of the command line.
        file: TOML; none: no file (unless a variable names one).
        environ: variables; those that are empty count as not set.

    Raises:
        ConfigError: the file cannot be read, or the file or a variable sets what is no option or no value of it.
    """
    if file is None and environ.get(CONFIG_VARIABLE):
        file = Path(environ[CONFIG_VARIABLE]).expanduser()
    settings = {name: Setting(option.default, "default") for name, option in OPTIONS.items()}
    if file is not None:
        settings |= {name: Setting(value, "file", f"{file}") for name, value in read_config_file(file).items()}
    settings |= _from_environment(environ)
    settings |= {name: Setting(value, "command line", OPTIONS[name].flag) for name, value in given.items()}
    return {name: setting for name, setting in settings.items() if setting.value is not msgspec.NODEFAULT}


def engine_args_of(settings: Mapping[str, Setting]) -> EngineArgs:
    """Raises ConfigError: nobody has named a model."""
    if "model" not in settings:
        raise ConfigError(
            "model: none is given; name one on the command line, as `model` in a file, or in "
            f"{OPTIONS['model'].variable}"
        )
    return EngineArgs(**{name: setting.value for name, setting in settings.items()})


def read_config_file(path: Path) -> dict[str, Any]:
    """The options that a TOML file sets, under their names or as their flags are written (`max-num-seqs`).

    Raises:
        ConfigError: it cannot be read, or a key or value is wrong.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            raise ConfigError(f"{path}: {key}: no such option{_did_you_mean(name, '')}{_of_table(value)}")
        if name in values:
            raise ConfigError(f"{path}: {name}: stands there twice, once with - and once with _")
        values[name] = _checked(f"{path}", lambda option=OPTIONS[name], value=value: option.convert(value))
    return values


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that looks like an option and is none."""
    known = _PLACES | {option.variable for option in OPTIONS.values()}
    return [
        f"{name} is no option{_did_you_mean(name.removeprefix(_PREFIX).lower(), _PREFIX)}"
        for name in sorted(environ)
        if name.startswith(_PREFIX) and name not in known and not _KUBERNETES.match(name)
    ]


def _from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    return {
        name: Setting(_variable(option.variable, environ), "environment", option.variable)
        for name, option in OPTIONS.items()
        if environ.get(option.variable)
    }


def _variable(variable: str, environ: Mapping[str, str]) -> Any:
    text, option = environ[variable], OPTIONS[variable.removeprefix(_PREFIX).lower()]
    if text.startswith("tcp://") and option.name == "port":
        raise ConfigError(
            f"{variable}: {text} is no port. Kubernetes sets this variable where a service is named procengine: say "
            "`enableServiceLinks: false` in the pod, or give the service another name"
        )
    return _checked(variable, lambda: option.parse_all(text))


def _checked(where: str, read: Any) -> Any:
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _did_you_mean(name: str, prefix: str) -> str:
    near = nearest_option(name)
    if near is None:
        return ""
    return f"; did you mean {OPTIONS[near].variable if prefix else near}?"


def _of_table(value: Any) -> str:
    return " (options stand at the top level, in no table)" if isinstance(value, dict) else ""
