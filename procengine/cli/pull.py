"""`procengine pull NAME`: fetches a model.

Owns: nothing. Never does: know where models come from (`procengine.hub` does).
"""

from __future__ import annotations

import argparse

from procengine.paths import procengine_home

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Fetch a model into the model cache (PROCENGINE_HOME moves it). Prints the folder it is in."
    parser.add_argument("name", metavar="NAME", help="an alias such as smollm2-135m, or a hub id (org/name)")


def run(args: argparse.Namespace) -> int:
    """Fetch it, unless it is there."""
    from procengine.hub import pull

    print(pull(args.name, procengine_home()))
    return 0
