"""What a caller offers to a model: tools, and which of them it may or must call. Pure.

Owns: the checks of `tools` and `tool_choice`, and what they change in a request. Never does: talk to a group, or judge
a function's schema (the grammar's compiler does).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from procengine.errors import InvalidRequestError
from procengine.sampling_params import SamplingParams
from procengine.structured.spec import StructuredOutputs
from procengine.tool_calls.call_grammar import call_grammar
from procengine.tool_calls.registry import STYLES

__all__ = ["ToolChoice", "ToolOffer", "Tools", "make_offer"]

Tools: TypeAlias = Sequence[Mapping[str, Any]]  # as OpenAI's API describes functions; the chat template shows them
ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Mapping[str, Any]

_CHOICES = ("auto", "none", "required")
_NAMED = '{"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """What `tools` and `tool_choice` come to.

    Attributes:
        tools: what the chat template shows; None for nothing.
        style: how the answer is read; None: its text is left as it is.
        constraint: what the answer must be; None: anything.
    """

    tools: list[dict[str, Any]] | None = None
    style: str | None = None
    constraint: StructuredOutputs | None = None

    def params(self, params: SamplingParams | None) -> SamplingParams:
        """The parameters to send: markers of calls may be special tokens, and must be in the text.

        Raises:
            InvalidRequestError: they leave no text to read, or ask for another form of it.
        """
        params = params or SamplingParams()
        if self.style is None:
            return params
        if not params.detokenize:
            raise InvalidRequestError("detokenize: must be true with tools, whose calls are read from the text")
        if self.constraint is None:
            return msgspec.structs.replace(params, skip_special_tokens=False)
        if params.structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs: cannot be given along with a tool_choice that demands a call"
            )
        return msgspec.structs.replace(params, skip_special_tokens=False, structured_outputs=self.constraint)

    @contextmanager
    def naming_tools(self) -> Iterator[None]:
        """While the request runs: an error of the constraint is one of the tools, since nobody asked for a grammar."""
        try:
            yield
        except InvalidRequestError as error:
            field, _, reason = str(error).partition(": ")
            if self.constraint is None or field not in ("grammar", "structured_outputs"):
                raise
            raise InvalidRequestError(f"tools: cannot become a grammar of calls: {reason}") from error

    def stream_params(self, params: SamplingParams | None, *, echo: bool = False) -> SamplingParams:
        """The same for a caller who takes deltas.

        Raises:
            InvalidRequestError: also for the cumulative kind; and with `echo`, since a prompt may show calls, too.
        """
        params = self.params(params)
        if self.style is None:
            return params
        if echo:
            raise InvalidRequestError("echo: cannot be given along with tools, whose calls are read from the text")
        if params.output_kind == "cumulative":
            raise InvalidRequestError('output_kind: must not be "cumulative" with tools, whose calls come as deltas')
        return params


def make_offer(tools: Tools | None, tool_choice: ToolChoice | None, parser: str, *, parallel: bool = True) -> ToolOffer:
    """The offer of one request to a group whose `Welcome` names `parser`.

    tool_choice: None is "auto". With "none" the model does not see the tools.
    parallel: whether an answer that must be calls may be several.

    Raises:
        InvalidRequestError: one of them is malformed, or they do not go together, or with the group.
    """
    if tools is None:
        if tool_choice not in (None, "none"):
            raise InvalidRequestError(f"tool_choice: {tool_choice!r} needs tools, and none were given")
        return ToolOffer()
    functions = _functions(tools)
    wanted = _wanted(tool_choice, functions)
    if tool_choice == "none":
        return ToolOffer()
    shown = [dict(tool) for tool in tools]
    style = parser if parser in STYLES else None
    if not wanted:
        return ToolOffer(shown, style)
    if style is None:
        raise InvalidRequestError(
            f"tool_choice: {tool_choice!r} needs a group that reads tool calls, and this one does not; "
            f"it takes the option --tool-call-parser, one of {', '.join(STYLES)}"
        )
    only_one = not (parallel and isinstance(tool_choice, str))
    grammar = call_grammar(style, {name: functions[name] for name in wanted}, only_one=only_one)
    return ToolOffer(shown, style, StructuredOutputs(grammar=grammar))


def _functions(tools: Tools) -> dict[str, Mapping[str, Any] | None]:
    """The schema of each function's arguments by its name."""
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence) or not tools:
        raise InvalidRequestError(f"tools: must be a list of at least one function, got {tools!r}")
    functions: dict[str, Mapping[str, Any] | None] = {}
    for index, tool in enumerate(tools):
        name, parameters = _function(f"tools[{index}]", tool)
        if name in functions:
            raise InvalidRequestError(f"tools[{index}].function.name: {name!r} is there twice")
        functions[name] = parameters
    return functions


def _function(field: str, tool: object) -> tuple[str, Mapping[str, Any] | None]:
    if not isinstance(tool, Mapping):
        raise InvalidRequestError(f"{field}: must be an object, got {tool!r}")
    if tool.get("type", "function") != "function":
        raise InvalidRequestError(f'{field}.type: must be "function", got {tool["type"]!r}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{field}.function: must be an object, got {function!r}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name or not name.isprintable():
        raise InvalidRequestError(f"{field}.function.name: must be a non-empty, printable string, got {name!r}")
    if parameters is None:
        return name, None
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidRequestError(
            f"{field}.function.parameters: must be a JSON schema whose type is object, got {parameters!r}"
        )
    return name, parameters


def _wanted(tool_choice: ToolChoice | None, functions: Mapping[str, object]) -> list[str]:
    """The functions of which one must be called; none if nothing must."""
    if tool_choice is None or isinstance(tool_choice, str):
        if tool_choice not in (None, *_CHOICES):
            raise InvalidRequestError(
                f"tool_choice: must be one of {', '.join(_CHOICES)} or {_NAMED}, got {tool_choice!r}"
            )
        return list(functions) if tool_choice == "required" else []
    name = _named(tool_choice)
    if name not in functions:
        raise InvalidRequestError(
            f"tool_choice: there is no function {name!r} in tools, which has {', '.join(functions)}"
        )
    return [name]


def _named(tool_choice: object) -> str:
    if isinstance(tool_choice, Mapping) and tool_choice.get("type", "function") == "function":
        function = tool_choice.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return str(function["name"])
    raise InvalidRequestError(f"tool_choice: must be one of {', '.join(_CHOICES)} or {_NAMED}, got {tool_choice!r}")
