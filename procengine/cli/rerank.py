"""`procengine rerank MODEL QUERY DOCUMENT...`: documents, the best first, one JSON object a line.

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
        "Launch a group, print documents by how well they go with a query, tear it down. A cross encoder or a "
        "language model that reranks reads both together; of any other model the vectors are compared."
    )
    add_examples(
        parser,
        ('procengine rerank smollm2-135m "Where is the cat?" "A dog runs." "The cat sleeps."', "by vectors"),
        (
            'procengine rerank ./cross-encoder "Where is the cat?" - --top-n 3 < texts.txt',
            "by a cross encoder, the best three",
        ),
    )
    add_text_arguments(parser)
    parser.add_argument("query", metavar="QUERY", help="what is looked for; - is all of stdin")
    parser.add_argument("documents", metavar="DOCUMENT", nargs="+", help="a text; - reads one from each line of stdin")
    parser.add_argument("--top-n", type=int, help="print the best so many only")
    parser.add_argument("--instruction", metavar="TEXT", help="what counts, for language models that rerank")


def run(args: argparse.Namespace) -> int:
    """Ask and print."""
    query, documents = text_of(args.query), texts_of(args.documents)
    with private_group(args, "rerank") as (client, options):
        results = client.rerank(query, documents, top_n=args.top_n, instruction=args.instruction, **options)
    for result in results:
        print_json(result)
    return 0
