"""The body of Anthropic's `/v1/messages`, and the conversation it says. Pure.

Owns: content blocks. Never does: render an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from procengine.api.conversation import conversation_body
from procengine.api.json_body import json_bytes
from procengine.client_bodies import Body
from procengine.errors import InvalidRequestError
from procengine.sampling_params import SamplingParams
from procengine.tool_calls.offer import ToolOffer

__all__ = [
    "COUNT_DECODER",
    "MESSAGES_DECODER",
    "CountRequest",
    "MessagesRequest",
    "messages_request_body",
    "openai_messages",
    "openai_tools",
]

_SKIPPED_BLOCKS: Final = ("thinking", "redacted_thinking")  # thoughts of earlier turns: templates show none


class _Turns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both requests have."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None  # taken, without effect: the model's text is what it is


class CountRequest(_Turns, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`/v1/messages/count_tokens`."""


class MessagesRequest(_Turns, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`/v1/messages`."""

    max_tokens: int
    stop_sequences: tuple[str, ...] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def parallel(self) -> bool:
        """Whether an answer may hold several calls."""
        return not (self.tool_choice or {}).get("disable_parallel_tool_use")


MESSAGES_DECODER: Final = msgspec.json.Decoder(MessagesRequest)
COUNT_DECODER: Final = msgspec.json.Decoder(CountRequest)


def messages_request_body(request: MessagesRequest, tool_call_parser: str) -> tuple[Body, ToolOffer]:
    """What is sent to the group, and how calls are read from the answer.

    Raises:
        InvalidRequestError: names the field.
    """
    named = {"temperature": request.temperature, "top_k": request.top_k, "top_p": request.top_p}
    params = SamplingParams(
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or None,
        output_kind="delta" if request.stream else "final",
        **{name: value for name, value in named.items() if value is not None},  # type: ignore[arg-type]
    )
    choice = _tool_choice(request.tool_choice)
    messages, tools = openai_messages(request), openai_tools(request)
    return conversation_body(messages, params, tools, choice, tool_call_parser, parallel=request.parallel)


def openai_messages(request: _Turns) -> list[dict[str, Any]]:
    """The conversation as chat templates know it."""
    if not request.messages:
        raise InvalidRequestError("messages: must not be empty")
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _texts("system", request.system)})
    for index, message in enumerate(request.messages):
        messages += _turn(f"messages[{index}]", message)
    return messages


def openai_tools(request: _Turns) -> list[dict[str, Any]] | None:
    """The tools as chat templates know them."""
    return [_tool(f"tools[{index}]", tool) for index, tool in enumerate(request.tools or ())] or None


def _tool(field: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") not in (None, "custom"):
        raise InvalidRequestError(f"{field}.type: only tools of the caller's are known here, got {tool['type']!r}")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any] | None) -> Any:
    if choice is None:
        return None
    kind = choice.get("type")
    plain = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in plain:
        raise InvalidRequestError(f"tool_choice.type: must be one of auto, any, tool, none, got {kind!r}")
    return plain[kind]


def _turn(field: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A turn; results of tools are turns of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequestError(f"{field}.role: must be user or assistant, got {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for place, block in _blocks(f"{field}.content", content):
        match block.get("type"):
            case "text":
                texts.append(_text(place, block))
            case "tool_use":
                calls.append(_call(place, block))
            case "tool_result":
                results.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.get("tool_use_id"),
                        "content": _texts(f"{place}.content", block.get("content") or ""),
                    }
                )
            case kind if kind in _SKIPPED_BLOCKS:
                pass
            case kind:
                raise InvalidRequestError(f"{place}.type: this model reads text only, got {kind!r}")
    if not texts and not calls:
        return results or [{"role": role, "content": ""}]
    turn: dict[str, Any] = {"role": role, "content": "\n".join(texts) if texts or not calls else None}
    return [*results, turn | ({"tool_calls": calls} if calls else {})]


def _call(field: str, block: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise InvalidRequestError(f"{field}: must have a name and an object as input, got {dict(block)!r}")
    function = {"name": name, "arguments": json_bytes(arguments).decode()}
    return {"id": block.get("id"), "type": "function", "function": function}


def _texts(field: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text(place, block) for place, block in _blocks(field, content))


def _text(field: str, block: Mapping[str, Any]) -> str:
    text = block.get("text")
    if block.get("type") != "text" or not isinstance(text, str):
        raise InvalidRequestError(f"{field}: must be a block of text, got {dict(block)!r}")
    return text


def _blocks(field: str, content: Any) -> Sequence[tuple[str, Mapping[str, Any]]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequestError(f"{field}: must be a string or a list of blocks, got {content!r}")
    return [(f"{field}[{index}]", block) for index, block in enumerate(content)]
