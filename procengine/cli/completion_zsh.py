"""The completion script for zsh. Owns: its text. Never does: know a command (`completion_tree` tells it).

One function a command, made of `_arguments`; zsh shows the help of each flag beside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from procengine.cli.completion_tree import Flag, Node, Values, nodes_of

__all__ = ["zsh_script"]

_HEAD: Final = """#compdef procengine
# zsh completion of procengine. Load it with: source <(procengine completion zsh), after compinit
_procengine_models() {
  local -a names
  names=(${(f)"$(procengine completion --list models 2>/dev/null)"})
  _alternative 'models:model:compadd -a names' 'files:file:_files'
}

_procengine_groups() {
  local -a names
  names=(${(f)"$(procengine completion --list groups 2>/dev/null)"})
  compadd -a names
}
"""
_TAIL: Final = """
if [[ $funcstack[1] == _procengine ]]; then _procengine "$@"; else compdef _procengine procengine; fi
"""
_ACTIONS: Final[Mapping[str, str]] = {
    "models": "_procengine_models",
    "groups": "_procengine_groups",
    "files": "_files",
    "folders": "_files -/",
    "": " ",
}


def zsh_script(root: Node) -> str:
    """The script that completes this tree."""
    return "\n".join([_HEAD, *("\n".join(_function(node)) + "\n" for node in nodes_of(root)), _TAIL.strip(), ""])


def _function(node: Node) -> Iterator[str]:
    yield f"{_name(node)}() {{"
    if node.children:
        yield "  local state line"
        yield "  local -a commands"
        yield f"  commands=({' '.join(shlex.quote(f'{child.path[-1]}:{child.help}') for child in node.children)})"
    yield "  _arguments -C \\" if node.children else "  _arguments \\"
    yield " \\\n".join(f"    {shlex.quote(spec)}" for spec in _specs(node))
    if node.children:
        yield "  case $state in"
        yield "    command) _describe command commands ;;"
        yield "    rest)"
        yield "      case $line[1] in"
        for child in node.children:
            yield f"        {child.path[-1]}) {_name(child)} ;;"
        yield "      esac ;;"
        yield "  esac"
    yield "}"


def _name(node: Node) -> str:
    return "_".join(["_procengine", *node.path]).replace("-", "_")


def _specs(node: Node) -> Iterator[str]:
    for flag in node.flags:
        yield from _flag_specs(flag)
    if node.children:
        yield from ("1: :->command", "*:: :->rest")
        return
    for number, values in enumerate(node.positionals, 1):
        yield f"{number}:{_kind(values)}:{_action(values)}"


def _flag_specs(flag: Flag) -> Iterator[str]:
    text = "".join(f"\\{mark}" if mark in "[]:\\" else mark for mark in flag.help)
    for name in flag.names:
        value = "" if flag.values is None else f":{_kind(flag.values)}:{_action(flag.values)}"
        yield f"*{name}[{text}]{value}"


def _kind(values: Values) -> str:
    return {"models": "model", "groups": "group", "files": "file", "folders": "folder", "": "value"}[values.source]


def _action(values: Values) -> str:
    return f"({' '.join(values.words)})" if values.words else _ACTIONS[values.source]
