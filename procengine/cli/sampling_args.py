"""Sampling parameters as flags, for `generate` and `chat`.

Owns: the flags' names and help. Never does: check a value (`SamplingParams` does).
"""

from __future__ import annotations

import argparse

from procengine.sampling_params import SamplingParams

__all__ = ["add_sampling_arguments", "sampling_params_from"]


def add_sampling_arguments(parser: argparse.ArgumentParser, *, temperature: float, max_tokens: int | None) -> None:
    """Add one flag a parameter; the command chooses the two defaults that matter most."""
    group = parser.add_argument_group("sampling options")
    limit = "the room left in the context" if max_tokens is None else max_tokens
    add = group.add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"most new tokens [{limit}]")
    add("--temperature", type=float, default=temperature, metavar="X", help=f"0 is greedy [{temperature:g}]")
    add("--top-p", type=float, default=1.0, metavar="X", help="keep the likeliest tokens of this total probability [1]")
    add("--top-k", type=int, default=0, metavar="N", help="keep the N likeliest tokens; 0 keeps all [0]")
    add("--min-p", type=float, default=0.0, metavar="X", help="drop tokens below this share of the likeliest one [0]")
    add("--seed", type=int, default=None, metavar="N", help="the same seed gives the same text [random]")
    add("--stop", action="append", default=[], metavar="TEXT", help="text that ends the answer; may be repeated")
    add("--ignore-eos", action="store_true", help="go on past the model's end tokens")


def sampling_params_from(args: argparse.Namespace) -> SamplingParams:
    """The parameters.

    Raises:
        InvalidRequestError: one is out of range.
    """
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        max_tokens=args.max_tokens,
    )
