"""`Admission`: whether a `Submit` may become a request, as far as that can be said before it is tokenized.

Owns: the bounds at the door and the wording of their errors. Never does: tokenize, or know the model (`accept` does).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from procengine.config import LimitsConfig
from procengine.errors import InvalidRequestError, OverloadedError
from procengine.messages import UNREADABLE, Submit, encode
from procengine.trace_context import TraceContext
from procengine.workflows.parts import FrontendParts
from procengine.workflows.prompt import PromptBody

__all__ = ["Admission"]

_MAX_REQUEST_ID_BYTES = 256
_MAX_TIME_NS = (1 << 63) - 1


class Admission:
    """One for the frontend."""

    def __init__(self, parts: Mapping[str, FrontendParts], limits: LimitsConfig) -> None:
        self._parts = parts
        self._limits = limits

    def check(
        self, message: Submit, *, num_bytes: int, num_unfinished: int, num_of_client: int, is_running: bool
    ) -> Any:
        """The body of a request that may come in, of its workflow's type.

        Args:
            message: what the client sent.
            num_bytes: its size on the wire.
            num_unfinished: requests of all clients that have not ended.
            num_of_client: those of this client.
            is_running: whether the client has an unfinished request of that id.

        Raises:
            InvalidRequestError: it may not; names the field, the value and the limit.
            OverloadedError: not now.
        """
        limits = self._limits
        parts = self._parts.get(message.workflow)
        if parts is None:
            known = ", ".join(sorted(self._parts))
            raise InvalidRequestError(
                f"workflow: {message.workflow!r} is not supported by this model, which does: {known}"
            )
        if num_bytes > limits.max_request_bytes:
            raise InvalidRequestError(
                f"request: has {num_bytes} bytes, the limit (max_request_bytes) is {limits.max_request_bytes}"
            )
        if not 0 < len(message.request_id.encode()) <= _MAX_REQUEST_ID_BYTES:
            raise InvalidRequestError(f"request_id: must have 1 to {_MAX_REQUEST_ID_BYTES} bytes")
        if not 0 <= message.sent_ns <= _MAX_TIME_NS:
            raise InvalidRequestError(f"sent_ns: must be 0 to {_MAX_TIME_NS} nanoseconds, got {message.sent_ns}")
        if message.traceparent:
            TraceContext.parse(message.traceparent)
        if is_running:
            raise InvalidRequestError(f"request_id: {message.request_id!r} is already running")
        if num_unfinished >= limits.max_queued_requests:
            raise OverloadedError(
                f"the group has {num_unfinished} unfinished requests, the limit (max_queued_requests) is "
                f"{limits.max_queued_requests}; try again later"
            )
        if num_of_client >= limits.max_client_requests:
            raise OverloadedError(
                f"this client has {num_of_client} unfinished requests, the limit (max_client_requests) is "
                f"{limits.max_client_requests}; try again later"
            )
        try:
            body = parts.decode_body(message.body)
        except UNREADABLE as error:
            raise InvalidRequestError(_field_first(str(error))) from error
        body.check_sizes(limits)
        _check_grammar(body, limits.max_grammar_bytes)
        return body


def _check_grammar(body: PromptBody, limit: int) -> None:
    """Before it is compiled: a grammar costs far more than its bytes."""
    num_bytes = 0 if body.grammar_spec is None else len(encode(body.grammar_spec))
    if num_bytes > limit:
        raise InvalidRequestError(
            f"structured_outputs: has {num_bytes} bytes, the limit (max_grammar_bytes) is {limit}"
        )


def _field_first(text: str) -> str:
    """msgspec says "Expected `int`, got `str` - at `$.a.b`"; we say "a.b: Expected `int`, got `str`"."""
    reason, separator, path = text.rpartition(" - at `$")
    return f"{path.rstrip('`').lstrip('.')}: {reason}" if separator else text
