"""`procengine completion SHELL`: a script that completes commands, flags, values, and names of models and groups.

Owns: what is listed for the scripts. Never does: load what a command runs on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from procengine.cli.examples import add_examples
from procengine.paths import procengine_home

__all__ = ["add_arguments", "run"]

_SHELLS: Final = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Print a completion script for a shell: commands, flags, values, names of models and of running groups."
    )
    add_examples(
        parser,
        ("source <(procengine completion bash)", "for this shell"),
        ("procengine completion bash > ~/.local/share/bash-completion/completions/procengine", "for all to come"),
        ('procengine completion zsh > "${fpath[1]}/_procengine"', "zsh"),
        ("procengine completion fish > ~/.config/fish/completions/procengine.fish", "fish"),
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("shell", nargs="?", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))
    what.add_argument("--list", choices=("models", "groups"), help="names, one a line, as the scripts ask for them")


def run(args: argparse.Namespace) -> int:
    """Print the script, or the names."""
    if args.list is not None:
        for name in _models() if args.list == "models" else _groups():
            print(name)
        return 0
    print(_script(args.shell), end="")
    return 0


def _script(shell: str) -> str:
    from procengine.cli.completion_tree import read_tree
    from procengine.cli.main import whole_parser

    tree = read_tree(whole_parser())
    if shell == "bash":
        from procengine.cli.completion_bash import bash_script

        return bash_script(tree)
    if shell == "zsh":
        from procengine.cli.completion_zsh import zsh_script

        return zsh_script(tree)
    from procengine.cli.completion_fish import fish_script

    return fish_script(tree)


def _models() -> Iterator[str]:
    """The aliases, and what was pulled."""
    from procengine.hub import ALIASES

    yield from sorted(ALIASES)
    folder = procengine_home() / "models"
    pulled = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    yield from (name.replace("--", "/", 1) for name in pulled if "--" in name and not name.startswith("."))


def _groups() -> Iterator[str]:
    from procengine.groups import running_groups

    yield from (group.name for group in running_groups())
