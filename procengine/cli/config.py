"""`procengine config`: a file of all options to start from, or what holds and who said so.

Owns: how both look. Never does: start anything.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from procengine.cli.engine_args import add_engine_arguments, settings_from
from procengine.cli.examples import add_examples
from procengine.engine_args import OPTIONS, check_ranges
from procengine.option import Option
from procengine.option_sources import Setting, engine_args_of, unknown_variables

__all__ = ["add_arguments", "run", "template"]

_SECRET = "***"  # noqa: S105 - what is shown in its place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Print a file for `serve --config` with every option, commented out, with its default and meaning. With "
        "--effective,\nsay what `serve` would be given by the same arguments: each option's value, and whether it is "
        "from the command line,\nthe environment, the file, or the default."
    )
    add_examples(
        parser,
        ("procengine config > procengine.toml", "a file to start from"),
        ("procengine config --effective smollm2-135m --port 8000", "each value and its source"),
        ("procengine config --effective --config procengine.toml --changed", "only what is no default"),
        ("procengine config --resolved smollm2-135m", "what `auto` becomes on this machine, as JSON"),
    )
    add = parser.add_argument
    add("--effective", action="store_true", help="each option's value and source")
    add("--changed", action="store_true", help="only those that are no default")
    add("--resolved", action="store_true", help="the whole configuration as JSON; looks at model and machine")
    add("--json", action="store_true", help="--effective as a JSON object")
    add_engine_arguments(parser, demands_model=False)


def run(args: argparse.Namespace) -> int:
    """Print what was asked for."""
    if not (args.effective or args.changed or args.json or args.resolved):
        print(template())
        return 0
    for line in unknown_variables(os.environ):
        print(f"procengine: {line}", file=sys.stderr)
    settings = settings_from(args, os.environ)
    if args.resolved:
        print(_resolved(settings))
        return 0
    shown = {name: one for name, one in settings.items() if not args.changed or one.source != "default"}
    print(_as_json(shown) if args.json else "\n".join(_rows(shown)))
    check_ranges(engine_args_of({"model": Setting("", "default")} | settings))
    return 0


def template() -> str:
    """TOML with every option as a comment."""
    return "\n".join(["# Options for `procengine serve --config FILE`. Take the # away to set one.", *_template()])


def _template() -> Iterator[str]:
    section = ""
    for name, option in OPTIONS.items():
        if section != option.about.section:
            section = option.about.section
            yield f"\n# --- {section}"
        default = "" if option.default is msgspec.NODEFAULT else f" [{option.shown_default}]"
        yield f"\n# {option.about.help}{default}"
        yield f"# {name} = {_toml(_example(option))}"


def _example(option: Option) -> Any:
    """The default; of an option that has none, what says so, or something of its type."""
    if option.default is msgspec.NODEFAULT:
        return "smollm2-135m"
    if option.default is None:
        return "" if option.kind is str else option.about.unset
    return option.default


def _toml(value: Any) -> str:
    return msgspec.json.encode(value).decode()  # numbers, texts, truths and lists look alike in both


def _rows(settings: Mapping[str, Setting]) -> Iterator[str]:
    rows = [(name, _shown(name, one), one.source, one.where) for name, one in settings.items()]
    widths = [max([0, *(len(row[column]) for row in rows)]) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[3]]).rstrip()


def _shown(name: str, setting: Setting) -> str:
    option = OPTIONS[name]
    return _SECRET if option.about.is_secret and setting.value else option.shown(setting.value)


def _as_json(settings: Mapping[str, Setting]) -> str:
    return msgspec.json.encode(
        {
            name: {
                "value": _SECRET if OPTIONS[name].about.is_secret and one.value else one.value,
                "source": one.source,
                "where": one.where or None,
            }
            for name, one in settings.items()
        }
    ).decode()


def _resolved(settings: Mapping[str, Setting]) -> str:
    from procengine.resolve import resolve

    config = msgspec.to_builtins(resolve(engine_args_of(settings)))
    config["api"]["api_keys"] = [_SECRET for _ in config["api"]["api_keys"]]
    return msgspec.json.format(msgspec.json.encode(config), indent=2).decode()
