"""`procengine lora load|unload NAME`: changes which LoRA adapters a running group has.

Owns: the report. Never does: load one itself; the group's workers do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from procengine.cli.examples import add_examples
from procengine.errors import ConfigError, EngineDeadError, error_from_code
from procengine.groups import find_group

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Load a LoRA adapter (a PEFT folder) into a running group that was started with --enable-lora, or unload one.\n"
        "Unloading waits for the requests that have it; new ones are refused meanwhile."
    )
    add_examples(
        parser,
        ("procengine lora load sql adapters/sql", "requests may name it from then on"),
        ("procengine lora unload sql --group prod", "when the requests that have it have ended"),
    )
    parser.add_argument("action", choices=("load", "unload"), help="what to do")
    parser.add_argument("name", metavar="NAME", help="what requests call the adapter")
    parser.add_argument("path", metavar="PATH", nargs="?", help="its folder, to load it")
    parser.add_argument("--group", metavar="GROUP", help="name or endpoint of the group [the only running one]")


def run(args: argparse.Namespace) -> int:
    """Ask for it, and wait until it is done."""
    from procengine.control_link import ask_supervisor
    from procengine.messages import LoadLora, UnloadLora, decode_lora_changed

    if (args.path is not None) != (args.action == "load"):
        raise ConfigError("path: must be given to load an adapter, and only then")
    group = find_group(args.group)
    question: LoadLora | UnloadLora = UnloadLora(0, args.name)
    if args.path is not None:
        question = LoadLora(0, args.name, str(Path(args.path).expanduser().absolute()))
    answer = ask_supervisor(group, question, None)
    if answer is None:
        raise EngineDeadError(f"group {group.name} has ended")
    changed = decode_lora_changed(answer)
    if changed.code:
        raise error_from_code(changed.code, changed.error)
    print(f"adapter {args.name} is {args.action}ed, in group {group.name}")
    return 0
