"""`procengine embed MODEL TEXT...`: the vectors of texts, one JSON object a line.

Owns: the command's arguments and what it prints. Never does: launch a group (`texts`).
"""

from __future__ import annotations

import argparse

from procengine.cli.examples import add_examples
from procengine.cli.texts import add_text_arguments, print_json, private_group, texts_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Launch a group, print a vector of each text as a JSON line, tear it down."
    add_examples(
        parser,
        ('procengine embed smollm2-135m "A cat sleeps." "A dog runs."', "a vector each"),
        ("procengine embed smollm2-135m - --dimensions 64 < texts.txt", "a text each line, shorter vectors"),
    )
    add_text_arguments(parser)
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="a text; - reads one from each line of stdin")
    parser.add_argument("--dimensions", type=int, help="keep the first so many numbers of each vector")
    parser.add_argument("--prompt-name", help="which of the model's own prompts goes before each text")


def run(args: argparse.Namespace) -> int:
    """Ask and print."""
    texts = texts_of(args.texts)
    with private_group(args, "embed") as (client, options):
        vectors = client.embed(texts, dimensions=args.dimensions, prompt_name=args.prompt_name, **options)
    for text, output in zip(texts, vectors, strict=True):
        print_json({"text": text, "embedding": output.embedding, "num_tokens": len(output.prompt_token_ids)})
    return 0
