"""`procengine COMMAND`: finds the command, runs it, and turns what goes wrong into one line and an exit status.

Owns: the list of commands, exit statuses, error lines. Never does: what a command does.
Exit statuses: 0 done, 1 an error (one line on stderr), 2 a wrong command line, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import procengine
from procengine.errors import ProcengineError

__all__ = ["main"]

_INTERRUPTED: Final = 130
_BROKEN_PIPE: Final = 141


class _Command(NamedTuple):
    """A command: `module` has `add_arguments(parser)` and `run(args) -> int`."""

    module: str
    summary: str


_COMMANDS: Final = {
    "serve": _Command("procengine.cli.serve", "launch a process group and keep it running"),
    "chat": _Command("procengine.cli.chat", "talk to a running group"),
    "generate": _Command("procengine.cli.generate", "launch, answer prompts, tear down"),
    "embed": _Command("procengine.cli.embed", "launch, print the vectors of texts, tear down"),
    "classify": _Command("procengine.cli.classify", "launch, print the labels of texts, tear down"),
    "score": _Command("procengine.cli.score", "launch, print how well texts go together, tear down"),
    "rerank": _Command("procengine.cli.rerank", "launch, print documents by how well they answer, tear down"),
    "run-batch": _Command("procengine.cli.run_batch", "answer a file of requests"),
    "ps": _Command("procengine.cli.ps", "show every process of the running groups"),
    "health": _Command("procengine.cli.health", "say whether a running group serves and gets on with it"),
    "drain": _Command("procengine.cli.drain", "end a running group when what it runs is finished"),
    "restart": _Command("procengine.cli.restart", "replace one process of a running group"),
    "top": _Command("procengine.cli.top", "watch a running group"),
    "pull": _Command("procengine.cli.pull", "fetch a model"),
    "record": _Command("procengine.cli.record", "write down what a running group does, to run it again"),
    "replay": _Command("procengine.cli.replay", "run the requests of a record again, and compare their tokens"),
    "keys": _Command("procengine.cli.keys", "make the keys of tcp connections"),
    "doctor": _Command("procengine.cli.doctor", "look at what a group needs of this machine"),
    "bench": _Command("procengine.cli.bench", "measure a group, its parts, or two of them side by side"),
    "trace": _Command("procengine.cli.trace", "write what a running group does to a trace file"),
    "profile": _Command("procengine.cli.profile", "show where the time of a running group goes, or of one under load"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status; argparse itself exits with 2 on a wrong one."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments and arguments[0] in _COMMANDS else None
    args = _parser(name).parse_args(arguments)
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


def _parser(name: str | None) -> argparse.ArgumentParser:
    """The parser; only the named command's module is imported, for its arguments."""
    parser = argparse.ArgumentParser(
        prog="procengine",
        description="An inference engine for language models, built as a pipeline of processes linked by ZeroMQ.",
        epilog="`procengine COMMAND --help` explains a command. A first try: procengine generate smollm2-135m 'Hello'",
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
        if each == name:
            module = importlib.import_module(command.module)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser
