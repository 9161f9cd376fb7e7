"""Anthropic's messages: the whole answer and its events. Pure.

Owns: content blocks of an answer, and why it stopped in Anthropic's words. Never does: know who reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from procengine.api.answer import AnswerFacts
from procengine.api.anthropic_request import MessagesRequest
from procengine.api.choices import choices_of
from procengine.api.conversation import ContentStream
from procengine.api.errors import ApiError, anthropic_body
from procengine.api.exchange import Response
from procengine.api.json_body import json_bytes
from procengine.api.usage import UsageCounter
from procengine.messages import Delta, Embedding
from procengine.tool_calls.calls import ToolCallDelta

__all__ = ["MessagesStream", "messages_answer"]

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


class MessagesStream:
    """One answer's events. Blocks come one after the other: a text, then calls."""

    is_anthropic = True

    def __init__(self, request: MessagesRequest, facts: AnswerFacts, style: str | None) -> None:
        self._facts = facts
        self._usage = UsageCounter()
        self._content = ContentStream(style, facts.call_seed, parallel=request.parallel)
        self._has_begun = False
        self._num_blocks = 0
        self._open: str | int | None = None  # "text", or the index of a call
        self._end: dict[str, Any] = {}

    def take(self, prompt: int, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas."""
        parts: list[bytes] = []
        for delta in deltas:
            self._usage.add(prompt, delta)
            if not self._has_begun:
                self._has_begun = True
                message = _message(self._facts, [], None, None, self._usage)
                parts += [_event("message_start", message=message), _event("ping")]
            text, calls, finish_reason = self._content.read(delta)
            if text:
                parts += self._text(text)
            for call in calls:
                parts += self._call(call)
            if finish_reason is not None:
                self._end = _end(finish_reason, delta.stop_reason)
        return b"".join(parts)

    def finish(self) -> bytes:
        """Why it stopped, and the end."""
        usage = _usage(self._usage)
        return b"".join([*self._close(), _event("message_delta", delta=self._end, usage=usage), _event("message_stop")])

    def fail(self, error: ApiError) -> bytes:
        """An error behind the first event."""
        return b"event: error\ndata: " + json_bytes(anthropic_body(error)) + b"\n\n"

    def _text(self, text: str) -> list[bytes]:
        parts: list[bytes] = []
        if self._open != "text":
            parts = [*self._close(), self._start("text", {"type": "text", "text": ""})]
        delta = {"type": "text_delta", "text": text}
        return [*parts, _event("content_block_delta", index=self._num_blocks - 1, delta=delta)]

    def _call(self, call: ToolCallDelta) -> list[bytes]:
        parts: list[bytes] = []
        if self._open != call.index:
            block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}}
            parts = [*self._close(), self._start(call.index, block)]
        if call.function.arguments:
            delta = {"type": "input_json_delta", "partial_json": call.function.arguments}
            parts.append(_event("content_block_delta", index=self._num_blocks - 1, delta=delta))
        return parts

    def _start(self, what: str | int, block: dict[str, Any]) -> bytes:
        self._open = what
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._num_blocks - 1)]


def messages_answer(
    request: MessagesRequest, facts: AnswerFacts, style: str | None, prompts: list[list[Delta | Embedding]]
) -> Response:
    """The whole answer."""
    (items,) = prompts
    usage = UsageCounter()
    usage.add_all(0, (item for item in items if isinstance(item, Delta)))
    (choice,) = choices_of(items)
    text, calls, finish_reason = choice.with_calls(style, facts.call_seed, request.parallel)
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    blocks += [
        {"type": "tool_use", "id": one.id, "name": one.function.name, "input": _arguments(one.function.arguments)}
        for one in calls
    ]
    end = _end(finish_reason or "stop", choice.stop_reason)
    return Response(200, json_bytes(_message(facts, blocks, end["stop_reason"], end["stop_sequence"], usage)))


def _arguments(text: str) -> dict[str, Any]:
    """The object that a call's arguments are; one that was cut is none yet."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _end(finish_reason: str, stop_reason: int | str | None) -> dict[str, Any]:
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _STOP_REASONS.get(finish_reason, "end_turn"), "stop_sequence": None}


def _message(
    facts: AnswerFacts, blocks: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: UsageCounter
) -> dict[str, Any]:
    return {
        "id": facts.answer_id,
        "type": "message",
        "role": "assistant",
        "model": facts.model,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(usage),
    }


def _usage(usage: UsageCounter) -> dict[str, int]:
    """Tokens read from the cache are counted beside the others there, not among them."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_bytes({"type": kind, **fields}))
