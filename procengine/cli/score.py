"""`procengine score MODEL TEXT TEXT...`: how well the first text goes with each other, one JSON object a line.

Owns: the command's arguments and what it prints. Never does: launch a group (`texts`).
"""

from __future__ import annotations

import argparse

from procengine.cli.examples import add_examples
from procengine.cli.texts import add_text_arguments, print_json, private_group, text_of, texts_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Launch a group with a cross encoder or a language model that reranks, print how well the first text goes with "
        "each of the others, tear it down."
    )
    add_examples(
        parser,
        ('procengine score ./cross-encoder "a cat" "A cat sleeps." "A dog runs."', "a folder with a cross encoder"),
        ('procengine score ./cross-encoder "a cat" - < texts.txt', "a text each line"),
    )
    add_text_arguments(parser)
    parser.add_argument("text", metavar="TEXT", help="the first text; - is all of stdin")
    parser.add_argument("others", metavar="OTHER", nargs="+", help="a text; - reads one from each line of stdin")
    parser.add_argument("--instruction", metavar="TEXT", help="what counts, for language models that rerank")


def run(args: argparse.Namespace) -> int:
    """Ask and print."""
    text, others = text_of(args.text), texts_of(args.others)
    with private_group(args, "score") as (client, options):
        outputs = client.score(text, others, instruction=args.instruction, **options)
    for other, output in zip(others, outputs, strict=True):
        print_json({"text": other, "score": output.score})
    return 0
