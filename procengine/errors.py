"""The exception tree. Every error a caller can meet is a `ProcengineError`.

Errors that cross a socket carry a `code` (see `docs/PROTOCOL.md`), so that a client can raise the same class
that the server meant. This module imports nothing of ours.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccessDeniedError",
    "ConfigError",
    "EngineDeadError",
    "GroupNotFoundError",
    "InvalidRequestError",
    "ModelError",
    "OverloadedError",
    "ProcengineError",
    "ProtocolError",
    "RequestFailedError",
    "RequestLostError",
    "ShuttingDownError",
    "StartupError",
    "UnknownAdapterError",
    "error_from_code",
]


class ProcengineError(Exception):
    """Root of all errors raised on purpose by procengine."""

    code: ClassVar[str] = "internal"


class ConfigError(ProcengineError, ValueError):
    """A flag, a config file or a keyword argument is wrong: names the field, the value and what is allowed."""

    code = "config"


class ModelError(ProcengineError):
    """A model cannot be found, read or run: names the file or tensor."""

    code = "model"


class StartupError(ProcengineError):
    """A process group did not come up: names the child and shows its last log lines."""

    code = "startup"


class GroupNotFoundError(ProcengineError):
    """No running group answers to that name or endpoint, or several do and none was named."""

    code = "group_not_found"


class ProtocolError(ProcengineError):
    """A peer sent something that is not our protocol, or speaks another version of it."""

    code = "protocol"


class InvalidRequestError(ProcengineError, ValueError):
    """A request was refused: the message names the field, the value and the limit."""

    code = "invalid_request"


class UnknownAdapterError(InvalidRequestError):
    """A request names a LoRA adapter that is not loaded."""

    code = "unknown_adapter"


class OverloadedError(ProcengineError):
    """A bounded queue is full; try again later.

    Attributes:
        retry_after_s: when that is worth trying, as far as the group can tell; 0 is no hint.
    """

    code = "overloaded"

    def __init__(self, message: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDownError(ProcengineError):
    """The group is draining and takes no new requests."""

    code = "shutting_down"


class EngineDeadError(ProcengineError):
    """A process of the group died while the request was running."""

    code = "engine_dead"


class AccessDeniedError(ProcengineError):
    """A tcp endpoint did not let this client in, or is not who it should be: says which."""

    code = "access_denied"


class RequestLostError(EngineDeadError):
    """The frontend died while the request was running; it may be sent again."""

    code = "request_lost"


class RequestFailedError(ProcengineError):
    """An accepted request ended with `finish_reason="error"`."""

    code = "request_failed"


_BY_CODE: dict[str, type[ProcengineError]] = {
    cls.code: cls
    for cls in (
        ConfigError,
        ModelError,
        StartupError,
        GroupNotFoundError,
        ProtocolError,
        InvalidRequestError,
        UnknownAdapterError,
        OverloadedError,
        ShuttingDownError,
        EngineDeadError,
        RequestLostError,
        RequestFailedError,
    )
}


def error_from_code(code: str, message: str, retry_after_s: float = 0.0) -> ProcengineError:
    """The exception that stands for `code` on the wire; unknown codes become the root class."""
    if code == OverloadedError.code:
        return OverloadedError(message, retry_after_s)
    return _BY_CODE.get(code, ProcengineError)(message)
