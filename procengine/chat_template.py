"""Renders a conversation into a prompt with the model's own Jinja template.

Owns: the sandbox and the names a template may use (those of Hugging Face's `apply_chat_template`), and the shape of
`messages`: that of OpenAI's API, where a call's arguments are a text; templates get the object that it says. Never
does: tokenise, or trust a template: it came with a downloaded file, so it sees plain data only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension

from procengine.errors import InvalidRequestError, ModelError
from procengine.template_sandbox import BoundedSandbox

__all__ = ["ChatTemplate"]

# What evaluating a template on unexpected data can raise, besides Jinja's own errors.
_DATA_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks a model's own words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration of this attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `bos_token` and `eos_token` are the strings it may refer to.

    Raises ModelError when `source` is not valid Jinja.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        environment = BoundedSandbox(_GenerationTag)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is not valid Jinja: line {error.lineno}: {error}") from error
        except (jinja2.TemplateError, SyntaxError, *_DATA_ERRORS) as error:  # what Python makes of the compiled one
            raise ModelError(f"the model's chat template cannot be compiled: {error}") from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt of a conversation. Special tokens are in it, so it is tokenised without adding them.

        Raises InvalidRequestError naming `messages` when they have the wrong shape or the template refuses them.
        """
        _check_messages(messages)
        turns = [
            _plain(_with_parsed_calls(f"messages[{index}]", _without_nulls(message)))
            for index, message in enumerate(messages)
        ]
        plain_tools = None if tools is None else [_plain(tool) for tool in tools]
        try:
            return self._template.render(
                messages=turns,
                tools=plain_tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except (jinja2.TemplateError, *_DATA_ERRORS) as error:
            raise InvalidRequestError(f"messages: the model's chat template refused them: {error}") from error


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise InvalidRequestError("messages must not be empty")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages[{index}] must be an object, not {type(message).__name__}")
        for field in ("role", "content"):
            _check_field(index, field, message)


def _check_field(index: int, field: str, message: Mapping[str, Any]) -> None:
    value = message.get(field)
    if field == "content" and value is None and message.get("tool_calls"):
        return  # an assistant turn that only calls tools says nothing
    if field not in message:
        raise InvalidRequestError(f"messages[{index}].{field} is missing")
    if not isinstance(value, str):
        raise InvalidRequestError(f"messages[{index}].{field} must be a string, not {type(value).__name__}")


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    # Clients send `"name": null`; templates test whether a key is there, and would print "None".
    return {key: value for key, value in message.items() if value is not None}


def _with_parsed_calls(field: str, message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    parsed = [_with_parsed_arguments(f"{field}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return message | {"tool_calls": parsed}


def _with_parsed_arguments(field: str, call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{field}.function.arguments: must be the JSON text of an object, got {text[:100]!r}")
    return {**call, "function": {**function, "arguments": arguments}}


def _plain(value: Any) -> Any:
    """`value` rebuilt out of exact JSON types: methods of richer objects are out of the sandbox's sight."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise InvalidRequestError(f"messages: a {type(value).__name__} is not JSON data")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a model should not see.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().astimezone().strftime(date_format)  # the wall clock of this machine, as in transformers
