"""What the commands have in common that launch a private group, ask it about texts and print JSON lines.

Owns: their arguments and the group's life. Never does: print anything else on stdout.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from procengine.cli.engine_args import add_engine_arguments, engine_args_from

if TYPE_CHECKING:
    from procengine.client import Client

__all__ = ["add_text_arguments", "print_json", "private_group", "text_of", "texts_of"]


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the group, and what becomes of texts that are too long."""
    add_engine_arguments(parser)
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long, instead of refusing them")


def text_of(argument: str) -> str:
    """A text from the command line; - is all of stdin."""
    return sys.stdin.read() if argument == "-" else argument


def texts_of(arguments: list[str]) -> list[str]:
    """Texts from the command line; - is stdin, a text a line."""
    return [
        text
        for one in arguments
        for text in ([line.rstrip("\n") for line in sys.stdin if line.strip()] if one == "-" else [one])
    ]


@contextmanager
def private_group(args: argparse.Namespace, command: str) -> Iterator[tuple[Client, dict[str, Any]]]:
    """A client of a group of our own, and the options that all its requests have."""
    from procengine.client import Client
    from procengine.launch import launch_group
    from procengine.resolve import resolve

    config = resolve(engine_args_from(args, default_name=f"{command}-{os.getpid()}"))
    with launch_group(config) as group, Client(group.endpoint) as client:
        yield client, {"truncate_prompt_tokens": -1} if args.truncate else {}


def print_json(value: object) -> None:
    """One line."""
    print(msgspec.json.encode(value).decode())
