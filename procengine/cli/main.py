"""`procengine COMMAND`: finds the command, runs it, and turns what goes wrong into one line and an exit status.

Owns: the list of commands, exit statuses, error lines. Never does: what a command does.
Exit statuses: 0 done, 1 an error (one line on stderr), 2 a wrong command line, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import procengine
from procengine.cli.examples import add_examples
from procengine.errors import ProcengineError

__all__ = ["main", "whole_parser"]

_MANY_FLAGS: Final = 12  # a usage of more is no help
_INTERRUPTED: Final = 130
_BROKEN_PIPE: Final = 141


class _Command(NamedTuple):
    """A command: `module` has `add_arguments(parser)` and `run(args) -> int`."""

    module: str
    summary: str


_COMMANDS: Final = {
    "serve": _Command("procengine.cli.serve", "launch a process group and keep it running"),
    "config": _Command("procengine.cli.config", "show what the options are, and who set them"),
    "chat": _Command("procengine.cli.chat", "talk to a running group"),
    "generate": _Command("procengine.cli.generate", "launch, answer prompts, tear down"),
    "embed": _Command("procengine.cli.embed", "launch, print the vectors of texts, tear down"),
    "classify": _Command("procengine.cli.classify", "launch, print the labels of texts, tear down"),
    "score": _Command("procengine.cli.score", "launch, print how well texts go together, tear down"),
    "score-text": _Command("procengine.cli.score_text", "launch, print how likely texts are, tear down"),
    "rerank": _Command("procengine.cli.rerank", "launch, print documents by how well they answer, tear down"),
    "run-batch": _Command("procengine.cli.run_batch", "answer a file of requests"),
    "ps": _Command("procengine.cli.ps", "show every process of the running groups"),
    "health": _Command("procengine.cli.health", "say whether a running group serves and gets on with it"),
    "drain": _Command("procengine.cli.drain", "end a running group when what it runs is finished"),
    "restart": _Command("procengine.cli.restart", "replace one process of a running group"),
    "lora": _Command("procengine.cli.lora", "load or unload a LoRA adapter of a running group"),
    "top": _Command("procengine.cli.top", "watch a running group"),
    "pull": _Command("procengine.cli.pull", "fetch a model"),
    "record": _Command("procengine.cli.record", "write down what a running group does, to run it again"),
    "replay": _Command("procengine.cli.replay", "run the requests of a record again, and compare their tokens"),
    "keys": _Command("procengine.cli.keys", "make the keys of tcp connections"),
    "doctor": _Command("procengine.cli.doctor", "look at what a group needs of this machine"),
    "completion": _Command("procengine.cli.completion", "print a completion script for bash, zsh or fish"),
    "bench": _Command("procengine.cli.bench", "measure a group, its parts, or two of them side by side"),
    "trace": _Command("procengine.cli.trace", "write what a running group does to a trace file"),
    "profile": _Command("procengine.cli.profile", "show where the time of a running group goes, or of one under load"),
}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Makes room for the indented names of commands, which argparse forgets."""

    def add_argument(self, action: argparse.Action) -> None:
        """See argparse."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            self._action_max_length += 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status; argparse itself exits with 2 on a wrong one."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments and arguments[0] in _COMMANDS else None
    args = _parser(() if name is None else (name,)).parse_args(arguments)
    try:
        return int(args.run(args))
    except ProcengineError as error:
        print(f"procengine: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit has a place to go
        return _BROKEN_PIPE


def whole_parser() -> argparse.ArgumentParser:
    """The parser with the arguments of every command."""
    return _parser(tuple(_COMMANDS))


def _parser(names: Collection[str]) -> argparse.ArgumentParser:
    """The parser; only the named commands' modules are imported, for their arguments."""
    parser = argparse.ArgumentParser(
        prog="procengine",
        description="An inference engine for language models, built as a pipeline of processes linked by ZeroMQ.",
        formatter_class=_Formatter,
    )
    add_examples(
        parser,
        ("procengine pull smollm2-135m", "fetch a small model, once"),
        ("procengine generate smollm2-135m 'Once upon a time'", "a first try"),
        ("procengine serve smollm2-135m --port 8000", "a group that stays, with OpenAI's HTTP API"),
        ("procengine chat", "talk to it"),
        notes="`procengine COMMAND --help` explains a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"procengine {procengine.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for each, command in _COMMANDS.items():
        sub = commands.add_parser(
            each,
            help=command.summary,
            description=command.summary.capitalize() + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if each in names:
            module = importlib.import_module(command.module)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
            _shorten_usage(sub)
    return parser


def _shorten_usage(parser: argparse.ArgumentParser) -> None:
    """Where there are many flags, the first line names only those that must be given."""
    flags = [action for action in parser._actions if action.option_strings]  # noqa: SLF001 - argparse has no other way
    if len(flags) <= _MANY_FLAGS:
        return
    formatter = parser._get_formatter()  # noqa: SLF001
    shown = [action for action in parser._actions if action.required or not action.option_strings]  # noqa: SLF001
    formatter.add_usage(None, shown, [], prefix="")
    _, arguments = formatter.format_help().strip().replace("%", "%%").split(parser.prog, 1)
    parser.usage = f"{parser.prog} [options]{arguments}"
