"""Sampling parameters as flags, for `generate` and `chat`, derived from `SamplingParams` as `engine_args` are.

Owns: the flags' help, and how lists, maps and files are written on a command line. Never does: check a value
(`SamplingParams` does).
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from procengine.errors import ConfigError
from procengine.sampling_params import SamplingParams
from procengine.structured.spec import StructuredOutputs

__all__ = ["add_sampling_arguments", "sampling_params_from"]

# One flag each, in this order. Left out: `structured_outputs`, whose fields have flags of their own, and `output_kind`,
# which is how a command reads its answers.
_HELP: Final[Mapping[str, str]] = {
    "max_tokens": "most new tokens",
    "min_tokens": "no end before this many new tokens",
    "temperature": "0 is greedy",
    "top_p": "keep the likeliest tokens of this total probability",
    "top_k": "keep the N likeliest tokens; 0 keeps all",
    "min_p": "drop tokens below this share of the likeliest one",
    "presence_penalty": "taken off the logit of every token that the answer has",
    "frequency_penalty": "taken off the logit of a token for each time that the answer has it",
    "repetition_penalty": "above 1, makes tokens that prompt or answer have less likely",
    "seed": "the same seed gives the same text",
    "n": "answers to each prompt",
    "stop": "text that ends the answer; may be repeated",
    "include_stop_str_in_output": "leave the stop in the text",
    "stop_token_ids": "tokens that end the answer",
    "ignore_eos": "go on past the model's end tokens",
    "bad_words": "a word that does not come; may be repeated",
    "logit_bias": "JSON object from token id to what is added to its logit",
    "allowed_token_ids": "no other token comes",
    "logprobs": "show log probabilities of each token and the N likeliest (with --json)",
    "prompt_logprobs": "the same for the prompt (with --json)",
    "detokenize": "turn the tokens into a text",
    "skip_special_tokens": "leave special tokens out of the text",
    "spaces_between_special_tokens": "has no effect with tokenizers of this kind; taken for compatibility",
    "truncate_prompt_tokens": "keep the last N tokens of a prompt; -1 keeps what the context allows",
    "stream_interval": "tokens between two pieces of a streamed answer, at least",
}

# Flag -> (field of StructuredOutputs, whether the flag names a file that holds the value, help).
_STRUCTURED: Final[Mapping[str, tuple[str, bool, str]]] = {
    "--json-schema": ("json_schema", True, "a file with a JSON schema that the answer must satisfy"),
    "--json-object": ("json_object", False, "the answer is a JSON object"),
    "--regex": ("regex", False, "the whole answer matches this expression"),
    "--choice": ("choice", False, "the answer is one of these texts; repeat it for each"),
    "--grammar": ("grammar", True, "a file with a grammar (Lark or GBNF) that derives the answer"),
}


def add_sampling_arguments(
    parser: argparse.ArgumentParser,
    *,
    temperature: float,
    max_tokens: int | None,
    without: Collection[str] = (),
) -> None:
    """Add one flag a parameter; the command chooses the two defaults that matter most.

    Args:
        without: parameters that the command has no use for.
    """
    group = parser.add_argument_group("sampling options")
    hints = typing.get_type_hints(SamplingParams)
    defaults = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    defaults |= {"temperature": temperature, "max_tokens": max_tokens}
    for name, text in _HELP.items():
        if name not in without:
            _add_flag(group, name, defaults[name], hints[name], text)
    structured = parser.add_argument_group("form of the answer (at most one)")
    for flag, (field, is_file, text) in _STRUCTURED.items():
        _add_structured(structured, flag, field, text, is_file=is_file)


def sampling_params_from(args: argparse.Namespace) -> SamplingParams:
    """The parameters.

    Raises:
        InvalidRequestError: one is out of range.
        ConfigError: a file cannot be read.
    """
    values = {name: _as_tuple(getattr(args, name)) for name in _HELP if hasattr(args, name)}
    return SamplingParams(**values, structured_outputs=_structured_from(args))


def _add_flag(group: argparse._ArgumentGroup, name: str, default: Any, hint: Any, text: str) -> None:
    flag, shown = "--" + name.replace("_", "-"), f"{text} [{_shown(name, default)}]"
    kinds = [part for part in _parts(hint) if part is not type(None)]
    kind = kinds[-1]  # of `str | tuple[str, ...]` the tuple
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=shown)
    elif kind == tuple[str, ...]:
        group.add_argument(flag, action="append", default=None, metavar="TEXT", help=shown)
    elif kind == tuple[int, ...]:
        group.add_argument(flag, type=_parser_of("list of ids", _ids), default=None, metavar="ID,ID,...", help=shown)
    elif typing.get_origin(kind) is dict:
        group.add_argument(flag, type=_parser_of("JSON object", _json_map(kind)), metavar="JSON", help=shown)
    else:
        group.add_argument(flag, type=kind, default=default, metavar={int: "N", float: "X"}[kind], help=shown)


def _parts(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _shown(name: str, default: Any) -> str:
    if name == "max_tokens" and default is None:
        return "the room left in the context"
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None:
        return "random" if name == "seed" else "none"
    return f"{default:g}"


def _parser_of(what: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` with an error that argparse shows as it is."""

    def parse_or_explain(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, msgspec.DecodeError) as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}: {error}") from error

    return parse_or_explain


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _json_map(kind: Any) -> Callable[[str], Any]:
    return lambda text: msgspec.json.decode(text, type=kind)


def _add_structured(group: argparse._ArgumentGroup, flag: str, field: str, text: str, *, is_file: bool) -> None:
    if is_file:
        group.add_argument(flag, type=Path, metavar="FILE", help=text)
    elif field == "json_object":
        group.add_argument(flag, action="store_true", help=text)
    else:
        group.add_argument(flag, action="append" if field == "choice" else "store", metavar="TEXT", help=text)


def _structured_from(args: argparse.Namespace) -> StructuredOutputs | None:
    values: dict[str, Any] = {}
    for flag, (field, is_file, _) in _STRUCTURED.items():
        value = getattr(args, field)
        if value not in (None, False):
            values[field] = _read(flag, value) if is_file else _as_tuple(value)
    return StructuredOutputs(**values) if values else None


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error}") from error


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
