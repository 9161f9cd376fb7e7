"""`procengine pull NAME`: fetches a model.

Owns: nothing. Never does: know where models come from (`procengine.hub` does).
"""

from __future__ import annotations

import argparse

from procengine.cli.examples import add_examples
from procengine.paths import procengine_home

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Fetch a model into the model cache (PROCENGINE_HOME moves it). Prints the folder it is in."
    add_examples(
        parser,
        ("procengine pull smollm2-135m", "a small model of 92 MB, to try things out"),
        ("procengine pull Qwen/Qwen3-0.6B", "from a model hub; needs procengine[hub]"),
    )
    parser.add_argument("name", metavar="MODEL", help="an alias such as smollm2-135m, or a hub id (org/name)")


def run(args: argparse.Namespace) -> int:
    """Fetch it, unless it is there."""
    from procengine.hub import pull

    print(pull(args.name, procengine_home()))
    return 0
