"""The command line as a completion sees it: commands, their flags, what may stand behind each. Read from the parsers.

Owns: the reading. Never does: know a shell (`completion_bash`, `_zsh`, `_fish`), or a command of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple

__all__ = ["Flag", "Node", "Values", "nodes_of", "read_tree"]

Source = Literal["", "models", "groups", "files", "folders"]

# A metavar says of what kind a value is.
_SOURCES: Final[Mapping[str, Source]] = {
    "MODEL": "models",
    "GROUP": "groups",
    "FILE": "files",
    "FILE.png": "files",
    "PATH": "files",
    "KEYS": "files",
    "DIR": "folders",
}
_PROCESSES: Final = ("worker-0", "output", "frontend", "metrics", "api-0")


class Values(NamedTuple):
    """What may stand in one place: some words, or what a source knows; neither: anything."""

    words: tuple[str, ...] = ()
    source: Source = ""


class Flag(NamedTuple):
    """A flag by all its names; `values` is None where it takes none."""

    names: tuple[str, ...]
    help: str
    values: Values | None


class Node(NamedTuple):
    """A command: `path` is () for `procengine` itself, ("bench", "serve") for a mode."""

    path: tuple[str, ...]
    help: str
    flags: tuple[Flag, ...]
    positionals: tuple[Values, ...]
    children: tuple[Node, ...]


def read_tree(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), summary: str = "") -> Node:
    """The node of a parser, and below it those of its commands."""
    actions = parser._actions  # noqa: SLF001 - argparse tells nobody otherwise
    children: list[Node] = []
    positionals: list[Values] = []
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            children = [read_tree(sub, (*path, name), helps[name]) for name, sub in action.choices.items()]
        elif not action.option_strings:
            positionals.append(_values(action))
    flags = tuple(_flag(action) for action in actions if action.option_strings)
    return Node(path, summary, flags, tuple(positionals), tuple(children))


def nodes_of(root: Node) -> Iterator[Node]:
    """The node and all below it."""
    yield root
    for child in root.children:
        yield from nodes_of(child)


def _flag(action: argparse.Action) -> Flag:
    help_text = (action.help or "").replace("%%", "%")
    return Flag(tuple(action.option_strings), help_text, None if action.nargs == 0 else _values(action))


def _values(action: argparse.Action) -> Values:
    if action.choices is not None:
        return Values(tuple(map(str, action.choices)))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if metavar == "PROCESS":
        return Values(_PROCESSES)
    return Values(source=_SOURCES.get(metavar, ""))
