"""`procengine record GROUP`: a crash record of a group that has not crashed.

Owns: where the file goes. Never does: write it; the supervisor does.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Final

from procengine.cli.examples import add_examples
from procengine.errors import ConfigError, EngineDeadError
from procengine.groups import find_group

__all__ = ["add_arguments", "run"]

_WAIT_S: Final = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Write down the requests that a group runs or ran last, and its steps, as it does itself when a process dies "
        "(--crash-dir).\n`procengine replay` runs them again. The file holds prompts, unless the group was started "
        "with --redact-prompts."
    )
    add_examples(
        parser,
        ("procengine record", "into the folder of crash records"),
        ("procengine record prod -o now.record", "into this file"),
    )
    parser.add_argument("group", metavar="GROUP", nargs="?", help="name of the group [the only running one]")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to [the group's --crash-dir]")


def run(args: argparse.Namespace) -> int:
    """Ask for the file, say where it is."""
    from procengine.control_link import ask_supervisor
    from procengine.messages import WriteRecord, decode_record_written

    group = find_group(args.group)
    if not group.control:
        raise ConfigError(f"group {group.name}: only a group on this machine can be recorded")
    answer = ask_supervisor(group, WriteRecord(), _WAIT_S)
    if answer is None:
        raise EngineDeadError(f"the supervisor of group {group.name!r} did not answer within {_WAIT_S:g} s")
    written = decode_record_written(answer)
    if written.error:
        raise ConfigError(f"no record could be written: {written.error}")
    path = Path(written.path)
    if args.output is not None:
        try:
            path = Path(shutil.move(path, args.output))
        except OSError as error:
            raise ConfigError(
                f"output: {args.output} cannot be written: {error.strerror or error}; see {path}"
            ) from error
    print(f"{path}: {path.stat().st_size:,} bytes; run it again with: procengine replay {path}")
    return 0
