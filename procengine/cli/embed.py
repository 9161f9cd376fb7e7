"""`procengine embed MODEL TEXT...`: the vectors of texts, one JSON object a line.

Owns: the command's arguments and what it prints. Never does: launch a group (`texts`).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from procengine.cli.examples import add_examples
from procengine.cli.texts import add_text_arguments, print_json, private_group, texts_of
from procengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from procengine.client import Client

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Launch a group, print a vector of each text as a JSON line, tear it down."
    add_examples(
        parser,
        ('procengine embed smollm2-135m "A cat sleeps." "A dog runs."', "a vector each"),
        ("procengine embed smollm2-135m - --dimensions 64 < texts.txt", "a text each line, shorter vectors"),
        ('procengine embed ./bge-m3 --kind sparse "A cat sleeps."', "how much each token counts"),
    )
    add_text_arguments(parser)
    parser.add_argument(
        "--kind",
        choices=_ASK,
        default="dense",
        help="of each text a vector, or of each token a weight or a vector (bge-m3) [dense]",
    )
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="a text; - reads one from each line of stdin")
    parser.add_argument("--dimensions", type=int, help="keep the first so many numbers of each vector")
    parser.add_argument("--prompt-name", help="which of the model's own prompts goes before each text")


def run(args: argparse.Namespace) -> int:
    """Ask and print."""
    if args.dimensions is not None and args.kind != "dense":
        raise InvalidRequestError(f"--dimensions: only vectors of --kind dense can be shortened, not {args.kind}")
    texts = texts_of(args.texts)
    with private_group(args, "embed") as (client, options):
        found = _ASK[args.kind](client, texts, args, options | {"prompt_name": args.prompt_name})
    for text, numbers in zip(texts, found, strict=True):
        print_json({"text": text, **numbers})
    return 0


def _dense(client: Client, texts: list[str], args: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    vectors = client.embed(texts, dimensions=args.dimensions, **options)
    return [{"embedding": one.embedding, "num_tokens": len(one.prompt_token_ids)} for one in vectors]


def _sparse(client: Client, texts: list[str], _: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    found = client.embed_sparse(texts, **options)
    return [{"weights": one.weights, "num_tokens": len(one.prompt_token_ids)} for one in found]


def _multi(client: Client, texts: list[str], _: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    found = client.embed_multi(texts, **options)
    return [{"embeddings": one.vectors(), "num_tokens": len(one.prompt_token_ids)} for one in found]


_ASK: Final = {"dense": _dense, "sparse": _sparse, "multi": _multi}
