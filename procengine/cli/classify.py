"""`procengine classify MODEL TEXT...`: the labels of texts, one JSON object a line.

Owns: the command's arguments and what it prints. Never does: launch a group (`texts`).
"""

from __future__ import annotations

import argparse

from procengine.cli.examples import add_examples
from procengine.cli.texts import add_text_arguments, print_json, private_group, texts_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Launch a group, print the scores of a model's labels as a JSON line a text, tear it down."
    add_examples(
        parser,
        ('procengine classify ./sentiment "I liked it." "Never again."', "a folder with a classifier"),
        ("procengine classify ./sentiment - --logits < texts.txt", "a text each line"),
    )
    add_text_arguments(parser)
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="a text; - reads one from each line of stdin")
    parser.add_argument("--logits", action="store_true", help="print logits instead of scores")


def run(args: argparse.Namespace) -> int:
    """Ask and print."""
    texts = texts_of(args.texts)
    with private_group(args, "classify") as (client, options):
        outputs = client.classify(texts, use_activation=not args.logits, **options)
    for text, output in zip(texts, outputs, strict=True):
        scores = dict(zip(output.labels, output.scores, strict=True))
        print_json({"text": text, "label": output.label, "scores": scores})
    return 0
