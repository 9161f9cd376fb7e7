"""`ApiError`: what goes back instead of an answer, in the shapes of OpenAI's and of Anthropic's API. Pure.

Owns: which status, type and code an error of the group has over HTTP. Never does: send one.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Struct

from procengine.api.exchange import Response
from procengine.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    ProcengineError,
    ShuttingDownError,
    UnknownAdapterError,
)

__all__ = [
    "AnthropicAnswer",
    "ApiError",
    "ErrorAnswer",
    "anthropic_body",
    "api_error",
    "bad_request",
    "error_response",
    "openai_body",
]

_MAX_MESSAGE: Final = 2000
_MAX_PARAM: Final = 200
_RETRY_AFTER_S: Final = 1
_FIELD: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_.\[\]-]*): ")  # of the body, or a header
_TYPE_BY_STATUS: Final = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A request that is not answered as it wished.

    Attributes:
        param: the field of the request that is wrong, if one is.
        code: a word for programs.
        retry_after_s: when it may be worth trying again; None: not by itself.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        # Values of callers are quoted in messages: they may be long, and what is no Unicode text is no JSON either.
        super().__init__(_shown(message, _MAX_MESSAGE))
        self.status = status
        self.param = None if param is None else _shown(param, _MAX_PARAM)
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = headers

    @property
    def message(self) -> str:
        """What is wrong, for people."""
        return str(self)


def _shown(text: str, max_length: int) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= max_length else text[:max_length] + "..."


def bad_request(message: str) -> ApiError:
    """A 400 from a message that begins with the field that is wrong."""
    message = message.removeprefix("sampling_params.")  # the place in what the group is asked, not in what we are
    field = _FIELD.match(message)
    code = "context_length_exceeded" if "max_model_len" in message else None
    return ApiError(400, message, param=field.group(1) if field else None, code=code)


def api_error(error: Exception) -> ApiError:
    """What an exception is over HTTP. One that nobody foresaw says nothing of our insides."""
    match error:
        case ApiError():
            return error
        case UnknownAdapterError():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case InvalidRequestError():
            return bad_request(str(error))
        case OverloadedError():
            return ApiError(503, str(error), code="overloaded", retry_after_s=_RETRY_AFTER_S)
        case ShuttingDownError():
            return ApiError(503, str(error), code="shutting_down", retry_after_s=_RETRY_AFTER_S)
        case EngineDeadError():
            return ApiError(503, str(error), code=error.code, retry_after_s=_RETRY_AFTER_S)
        case ProcengineError():
            return ApiError(500, str(error), code=error.code)
        case _:
            return ApiError(500, "an error of the server; its log says which", code="internal")


class OpenAiError(Struct, frozen=True):
    """What is wrong, in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, frozen=True):
    """An error as an answer."""

    error: OpenAiError


class AnthropicError(Struct, frozen=True):
    """What is wrong, in Anthropic's shape."""

    type: str
    message: str


class AnthropicAnswer(Struct, frozen=True, tag_field="type", tag="error"):
    """An error as an answer of Anthropic's API."""

    error: AnthropicError


def openai_body(error: ApiError) -> ErrorAnswer:
    """OpenAI's shape."""
    kind = _TYPE_BY_STATUS.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    return ErrorAnswer(OpenAiError(error.message, kind, error.param, error.code))


def anthropic_body(error: ApiError) -> AnthropicAnswer:
    """Anthropic's shape."""
    kind = _ANTHROPIC_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    return AnthropicAnswer(AnthropicError(kind, error.message))


def error_response(error: ApiError, *, is_anthropic: bool = False) -> Response:
    """The answer."""
    body: ErrorAnswer | AnthropicAnswer = anthropic_body(error) if is_anthropic else openai_body(error)
    retry = () if error.retry_after_s is None else (("Retry-After", str(error.retry_after_s)),)
    return Response(error.status, msgspec.json.encode(body), headers=(*retry, *error.headers))
