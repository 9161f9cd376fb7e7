"""The body of `/v1/responses`, without state: what came before is in `input`. Pure.

Owns: input items, and the fields that only this route has. Never does: render an answer, or keep one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from procengine.api.chat_messages import plain_messages
from procengine.api.conversation import conversation_body
from procengine.client_bodies import Body
from procengine.errors import InvalidRequestError
from procengine.sampling_params import SamplingParams
from procengine.structured.spec import StructuredOutputs
from procengine.tool_calls.offer import ToolOffer

__all__ = ["RESPONSES_DECODER", "ResponsesRequest", "responses_body"]

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
)
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields, and a few of sampling. `store` is taken, since it is on by default; nothing is stored."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    background: bool | None = None
    conversation: Any = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    user: str | None = None


RESPONSES_DECODER: Final = msgspec.json.Decoder(ResponsesRequest)


def responses_body(request: ResponsesRequest, tool_call_parser: str) -> tuple[Body, ToolOffer]:
    """What is sent to the group, and how calls are read from the answer.

    Raises:
        InvalidRequestError: names the field.
    """
    for name, harmless in _REFUSED.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise InvalidRequestError(f"{name}: is not supported here, got {value!r}")
    values = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    params = SamplingParams(
        max_tokens=request.max_output_tokens,
        structured_outputs=_structured(request),
        output_kind="delta" if request.stream else "final",
        **values,
    )
    return conversation_body(
        plain_messages(_messages(request)),
        params,
        [_tool(f"tools[{index}]", tool) for index, tool in enumerate(request.tools or ())],
        _tool_choice(request.tool_choice),
        tool_call_parser,
        request.priority,
        request.cache_salt,
        parallel=request.parallel_tool_calls is not False,
    )


def _structured(request: ResponsesRequest) -> StructuredOutputs | None:
    wanted = request.text.format if request.text is not None else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputs(json_object=True)
    if wanted.schema is None:
        raise InvalidRequestError("text.format.schema: must be given with the type json_schema")
    return StructuredOutputs(json_schema=wanted.schema)


def _tool(field: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequestError(f'{field}.type: must be "function", got {tool.get("type")!r}')
    known = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": known}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        if not request.input:
            raise InvalidRequestError("input: must not be empty")
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise InvalidRequestError("input: must not be empty")
    for index, item in enumerate(request.input):
        _add_item(messages, f"input[{index}]", item)
    return messages


def _add_item(messages: list[dict[str, Any]], field: str, item: Mapping[str, Any]) -> None:
    match item.get("type", "message"):
        case "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)  # a turn's text and calls are one message
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        case "reasoning":
            pass  # thoughts of earlier turns: templates show none
        case kind:
            raise InvalidRequestError(f"{field}.type: is not supported here, got {kind!r}")
