"""Examples at the end of a command's `--help`. A test runs the parser on each, so they stay true.

Owns: how they look. Never does: know one.
"""

from __future__ import annotations

import argparse

__all__ = ["add_examples"]

_WIDTH = 62


def add_examples(parser: argparse.ArgumentParser, *examples: tuple[str, str], notes: str = "") -> None:
    """End the help with command lines, and what each does.

    Args:
        examples: command line and meaning.
        notes: a paragraph behind them.
    """
    width = min(max(len(line) for line, _ in examples), _WIDTH)
    lines = [f"  {line:<{width}}  # {what}" for line, what in examples]
    parser.epilog = "\n".join(["examples:", *lines, *(["", notes] if notes else [])]).replace("%", "%%")
