"""The completion script for fish. Owns: its text. Never does: know a command (`completion_tree` tells it)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from procengine.cli.completion_tree import Flag, Node, Values, nodes_of

__all__ = ["fish_script"]

_HEAD: Final = """# fish completion of procengine. Load it with: procengine completion fish | source
function __procengine_at --description 'whether the words before the cursor begin with these commands, and no more'
    set -l words (commandline -opc)
    set -e words[1]
    set -l path
    for word in $words
        string match -q -- '-*' $word; and continue
        set -l longer (string join ' ' $path $word)
        contains -- $longer $__procengine_paths; or break
        set path $path $word
    end
    test "$path" = "$argv[1]"
end
complete -c procengine -f"""
_SOURCES: Final = {
    "models": "(procengine completion --list models 2>/dev/null; __fish_complete_path (commandline -ct))",
    "groups": "(procengine completion --list groups 2>/dev/null)",
    "folders": "(__fish_complete_directories (commandline -ct))",
}


def fish_script(root: Node) -> str:
    """The script that completes this tree."""
    paths = " ".join(_quoted(" ".join(node.path)) for node in nodes_of(root) if node.path)
    return "\n".join([_HEAD, f"set -g __procengine_paths {paths}", *_lines(root), ""])


def _lines(root: Node) -> Iterator[str]:
    for node in nodes_of(root):
        here = "complete -c procengine -n " + _quoted(f'__procengine_at "{" ".join(node.path)}"')
        for child in node.children:
            yield f"{here} -a {child.path[-1]} -d {_quoted(child.help)}"
        for values in dict.fromkeys(node.positionals):
            if listed := _listed(values):
                yield f"{here} -a {_quoted(listed)}"
        for flag in node.flags:
            yield f"{here} {_flag(flag)}"


def _flag(flag: Flag) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
    return f"{names}{_value(flag.values)} -d {_quoted(flag.help)}"


def _value(values: Values | None) -> str:
    if values is None:
        return ""
    if values.source == "files":
        return " -r -F"
    return f" -x -a {_quoted(listed)}" if (listed := _listed(values)) else " -x"


def _listed(values: Values) -> str:
    return " ".join(values.words) or _SOURCES.get(values.source, "")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
