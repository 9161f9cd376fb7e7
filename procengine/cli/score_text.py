"""`procengine score-text MODEL TEXT...`: how likely a model finds texts, one JSON object a line.

Owns: the command's arguments and what it prints. Never does: launch a group (`texts`).
"""

from __future__ import annotations

import argparse
import math

from procengine.cli.examples import add_examples
from procengine.cli.texts import add_text_arguments, print_json, private_group, texts_of
from procengine.scores import perplexity

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Launch a group, print how likely the model finds each text: the sum of its tokens' log probabilities, their "
        "number and the perplexity; the last line is of all texts together. Tear the group down."
    )
    add_examples(
        parser,
        ('procengine score-text smollm2-135m "The sky is blue." "The sky is cheese."', "two texts"),
        ("procengine score-text smollm2-135m - < texts.txt", "a text each line"),
        ('procengine score-text smollm2-135m --tokens "The sky is blue."', "with each token's log probability"),
    )
    add_text_arguments(parser)
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="a text; - reads one from each line of stdin")
    parser.add_argument("--tokens", action="store_true", help="print the token ids and their log probabilities too")


def run(args: argparse.Namespace) -> int:
    """Ask and print."""
    texts = texts_of(args.texts)
    with private_group(args, "score-text") as (client, options):
        outputs = client.score_text(texts, **options)
    for text, output in zip(texts, outputs, strict=True):
        each = {"token_ids": output.prompt_token_ids, "logprobs": output.logprobs} if args.tokens else {}
        print_json(
            {
                "text": text,
                "logprob": output.logprob,
                "num_tokens": output.num_tokens,
                "perplexity": output.perplexity,
                **each,
            }
        )
    total, count = math.fsum(one.logprob for one in outputs), sum(one.num_tokens for one in outputs)
    print_json({"texts": len(texts), "logprob": total, "num_tokens": count, "perplexity": perplexity(total, count)})
    return 0
