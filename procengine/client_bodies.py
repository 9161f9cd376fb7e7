"""From what a caller passes to the body of a request: a plain map, encoded once.

Owns: what counts as a prompt, and errors that name the field which cannot be sent. Never does: check what the frontend
checks (ranges, lengths, the vocabulary), and never imports its side: field names are compared with it by a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, TypeAlias, cast

from procengine.errors import InvalidRequestError
from procengine.messages import encode
from procengine.sampling_params import SamplingParams

__all__ = [
    "Body",
    "Messages",
    "Prompt",
    "Prompts",
    "conversations",
    "encode_body",
    "generate_body",
    "messages_body",
    "one_params_each",
    "one_prompt_body",
    "prompt_body",
    "prompt_list",
    "prompt_text",
]

Body: TypeAlias = dict[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]  # a mapping: {"prompt": ...} or {"prompt_token_ids": ...}
Prompts: TypeAlias = Prompt | Sequence[Prompt]
Messages: TypeAlias = Sequence[Mapping[str, Any]]


def prompt_list(prompts: Prompts) -> tuple[list[Prompt], bool]:
    """The prompts one by one, and whether there was a list of them (a sequence of integers is one prompt)."""
    if isinstance(prompts, str | Mapping):
        return [prompts], False
    items = list(prompts)
    if items and not isinstance(items[0], str | Mapping | Iterable):
        return [cast(Prompt, prompts)], False
    return cast(list[Prompt], items), True


def conversations(messages: Messages | Sequence[Messages]) -> tuple[list[Messages], bool]:
    """The conversations one by one, and whether there was a list of them."""
    items = list(messages)
    if items and not isinstance(items[0], Mapping):
        return cast(list[Messages], items), True
    return [cast(Messages, messages)], False


def one_params_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    """Sampling parameters for each prompt.

    Raises:
        InvalidRequestError: there is a list of them, of another length.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(f"sampling_params: {len(params)} were given for {num_prompts} prompts")
    return params


def prompt_body(prompt: Prompt) -> Body:
    """`{"prompt": text}` or `{"prompt_token_ids": ids}`."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    try:
        if bool in set(map(type, prompt)):  # to Python they are integers, to the group they are not
            raise TypeError("'bool' object is no token id")
        return {"prompt_token_ids": list(map(index, prompt))}  # `index`: integers of numpy become ours
    except TypeError as error:
        raise InvalidRequestError(f"prompt_token_ids: must be a list of integers ({error})") from error


def messages_body(messages: Messages) -> Body:
    """`{"messages": [...]}`."""
    return {"messages": [dict(message) for message in messages]}


def one_prompt_body(prompt: Prompt | None, messages: Messages | None) -> Body:
    """The body for whichever of the two was given.

    Raises:
        InvalidRequestError: both were, or none.
    """
    if (prompt is None) == (messages is None):
        given = "none" if prompt is None else "both"
        raise InvalidRequestError(f"prompt: exactly one of prompt and messages must be given, got {given}")
    return messages_body(messages) if messages is not None else prompt_body(prompt or "")


def prompt_text(body: Body) -> str | None:
    """The text of a prompt, where it came as text."""
    text = body.get("prompt")
    return text if isinstance(text, str) else None


def generate_body(body: Body, params: SamplingParams | None, priority: int = 0, cache_salt: str = "") -> Body:
    """A prompt with all that `generate` takes beside it."""
    extra: Body = {"sampling_params": params or SamplingParams()}
    if priority:
        extra["priority"] = priority
    if cache_salt:
        extra["cache_salt"] = cache_salt
    return body | extra


def encode_body(body: Body) -> bytes:
    """The body as MessagePack.

    Raises:
        InvalidRequestError: it holds what MessagePack or UTF-8 cannot; names the field.
    """
    try:
        return encode(body)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise _name_field(body, error) from error


def _name_field(body: Body, error: Exception) -> InvalidRequestError:
    for field, value in body.items():
        try:
            encode(value)
        except UnicodeEncodeError as found:
            return InvalidRequestError(
                f"{field}: character {found.start} is a lone surrogate (U+{ord(found.object[found.start]):04X}), "
                "which no UTF-8 text can hold"
            )
        except OverflowError:
            return InvalidRequestError(f"{field}: holds an integer that does not fit into 64 bits")
        except TypeError as found:
            return InvalidRequestError(f"{field}: holds a value that cannot be sent ({found})")
    return InvalidRequestError(f"request: cannot be sent ({error})")
