"""From what a caller passes to the body of a request: a plain map, encoded once.

Owns: what counts as a prompt, and errors that name the field which cannot be sent. Never does: check what the frontend
checks (ranges, lengths, the vocabulary), and never imports its side: field names are compared with it by a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, TypeAlias, cast

import msgspec

from procengine.errors import InvalidRequestError
from procengine.messages import encode
from procengine.sampling_params import SamplingParams
from procengine.tool_calls.offer import Tools

__all__ = [
    "Body",
    "Messages",
    "Prompt",
    "Prompts",
    "Tools",
    "conversations",
    "encode_body",
    "final_body",
    "generate_body",
    "is_cumulative",
    "messages_body",
    "num_choices",
    "one_params_each",
    "one_prompt_body",
    "prefill_body",
    "prompt_body",
    "prompt_list",
    "prompt_text",
    "timed_body",
    "with_adapter",
]

Body: TypeAlias = dict[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]  # a mapping: {"prompt": ...} or {"prompt_token_ids": ...}
Prompts: TypeAlias = Prompt | Sequence[Prompt]
Messages: TypeAlias = Sequence[Mapping[str, Any]]


def prompt_list(prompts: Prompts) -> tuple[list[Prompt], bool]:
    """The prompts one by one, and whether there was a list of them (a sequence of integers is one prompt).

    Raises:
        InvalidRequestError: it is neither a prompt nor a list.
    """
    _check_kind(prompts)
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
    """`{"prompt": text}` or `{"prompt_token_ids": ids}`.

    Raises:
        InvalidRequestError: it is neither a text nor integers.
    """
    _check_kind(prompt)
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


def _check_kind(prompt: object) -> None:
    # To Python, bytes are a sequence of integers; whoever passes them means a text.
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Iterable):
        raise InvalidRequestError(f"prompt: must be a text or a list of token ids, got {prompt!r}")


def prefill_body(prompt: Prompt, timeout_s: float | None = None, **options: Any) -> Body:
    """The body of a request that generates nothing; options that are None are left out."""
    return timed_body(prompt_body(prompt) | {key: one for key, one in options.items() if one is not None}, timeout_s)


def messages_body(messages: Messages, tools: Tools | None = None) -> Body:
    """`{"messages": [...]}`, with `"tools"` if there are any."""
    body: Body = {"messages": _plain_maps("messages", messages)}
    return body if tools is None else body | {"tools": _plain_maps("tools", tools)}


def _plain_maps(field: str, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise InvalidRequestError(f"{field}: must be a list of objects, got {values!r}")
    for place, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{field}[{place}]: must be an object, got {value!r}")
    return [dict(value) for value in values]


def one_prompt_body(prompt: Prompt | None, messages: Messages | None, tools: Tools | None = None) -> Body:
    """The body for whichever of the first two was given.

    Raises:
        InvalidRequestError: both were, or none; or tools with a prompt.
    """
    if (prompt is None) == (messages is None):
        given = "none" if prompt is None else "both"
        raise InvalidRequestError(f"prompt: exactly one of prompt and messages must be given, got {given}")
    if messages is not None:
        return messages_body(messages, tools)
    if tools is not None:
        raise InvalidRequestError("tools: can only be given with messages")
    return prompt_body(prompt or "")


def prompt_text(body: Body) -> str | None:
    """The text of a prompt, where it came as text."""
    text = body.get("prompt")
    return text if isinstance(text, str) else None


def generate_body(
    body: Body,
    params: SamplingParams | None,
    priority: int = 0,
    cache_salt: str = "",
    *,
    echo: bool = False,
    lora_name: str = "",
    timeout_s: float | None = None,
) -> Body:
    """A prompt with all that `generate` takes beside it."""
    extra: Body = {"sampling_params": params or SamplingParams()}
    if priority:
        extra["priority"] = priority
    if cache_salt:
        extra["cache_salt"] = cache_salt
    if echo:
        extra["echo"] = echo
    return timed_body(with_adapter(body | extra, lora_name), timeout_s)


def with_adapter(body: Body, lora_name: str) -> Body:
    """The same request, to be answered by the model with this LoRA adapter; "": by the model as it is."""
    return body | {"lora_name": lora_name} if lora_name else body


def timed_body(body: Body, timeout_s: float | None) -> Body:
    """The same request, which is to be aborted after so many seconds; None is the group's default."""
    return body if timeout_s is None else body | {"timeout_s": timeout_s}


def final_body(body: Body) -> Body:
    """The same request for a caller who waits for its end: one message a choice, whatever kind was asked for."""
    params = body.get("sampling_params")
    if not isinstance(params, SamplingParams) or params.output_kind == "final":
        return body
    return body | {"sampling_params": msgspec.structs.replace(params, output_kind="final")}


def num_choices(body: Body) -> int:
    """How many ends the request has: one a choice. What is no count is refused by the group, as a whole."""
    params = body.get("sampling_params")
    return max(params.n, 1) if isinstance(params, SamplingParams) else 1


def is_cumulative(body: Body) -> bool:
    """Whether each message of the request is to hold everything so far."""
    params = body.get("sampling_params")
    return isinstance(params, SamplingParams) and params.output_kind == "cumulative"


def encode_body(body: Body) -> bytes:
    """The body as MessagePack.

    Raises:
        InvalidRequestError: it holds what MessagePack or UTF-8 cannot; names the field.
    """
    try:
        return encode(body)
    except _UNSENDABLE as error:
        field, found = _find_field("", body, error)
        raise InvalidRequestError(f"{field or 'request'}: {_reason(found)}") from error


_UNSENDABLE = (UnicodeEncodeError, OverflowError, TypeError, RecursionError)


def _find_field(path: str, value: object, error: Exception) -> tuple[str, Exception]:
    """The field that cannot be sent and why: a key of the body, or a parameter inside `sampling_params`."""
    fields = value.items() if not path and isinstance(value, dict) else _struct_fields(value)
    for name, inner in fields:
        try:
            encode(inner)
        except _UNSENDABLE as found:
            return _find_field(f"{path}.{name}" if path else str(name), inner, found)
    return path, error


def _struct_fields(value: object) -> Iterable[tuple[str, Any]]:
    return ((name, getattr(value, name)) for name in getattr(value, "__struct_fields__", ()))


def _reason(error: Exception) -> str:
    match error:
        case UnicodeEncodeError():
            surrogate = ord(error.object[error.start])
            return f"character {error.start} is a lone surrogate (U+{surrogate:04X}), which no UTF-8 text can hold"
        case OverflowError():
            return "holds an integer that does not fit into 64 bits"
        case RecursionError():
            return "nests too deep"
        case _:
            return f"holds a value that cannot be sent ({error})"
