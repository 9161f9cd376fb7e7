"""`ChatStream`: deltas as `chat.completion.chunk` events. Pure.

Owns: the events of `/v1/chat/completions`. Most of them hold a piece of text and nothing else: those are put together
from bytes that are made once. Never does: hold deltas back, or know who reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procengine.api.answer import AnswerFacts
from procengine.api.chat_request import ChatRequest
from procengine.api.conversation import ContentStream
from procengine.api.errors import ApiError, openai_body
from procengine.api.json_body import json_bytes
from procengine.api.logprobs import chat_logprobs, prompt_logprob_maps
from procengine.api.usage import UsageCounter
from procengine.messages import Delta

__all__ = ["DONE", "ChatStream"]

DONE = b"data: [DONE]\n\n"


class ChatStream:
    """One answer's events."""

    is_anthropic = False

    def __init__(self, request: ChatRequest, facts: AnswerFacts, style: str | None) -> None:
        self._request = request
        self._facts = facts
        self._usage = UsageCounter()
        self._begun: set[int] = set()
        self._content = ContentStream(style, facts.call_seed, parallel=request.parallel_tool_calls is not False)
        self._num_top = request.num_logprobs
        # Whether an event may hold more than a text: then all go the long way.
        self._is_rich = (
            style is not None
            or self._num_top is not None
            or bool(request.return_token_ids)
            or request.counts_always
            or request.prompt_logprobs is not None
        )
        self._head = {
            "id": facts.answer_id,
            "object": "chat.completion.chunk",
            "created": facts.created_s,
            "model": facts.model,
        }
        self._prefix = b"data: " + json_bytes(self._head)[:-1] + b',"choices":[{"index":'

    def take(self, prompt: int, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas."""
        parts: list[bytes] = []
        for delta in deltas:
            self._usage.add(prompt, delta)
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                parts.append(self._first(delta))
            if self._is_rich or delta.finish_reason is not None:
                parts.append(self._rich(delta))
            elif delta.text:
                parts.append(
                    b'%b%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]}\n\n'
                    % (self._prefix, delta.index, json_bytes(delta.text))
                )
        return b"".join(parts)

    def finish(self) -> bytes:
        """The counts, if they were asked for, and the end."""
        if not self._request.includes_usage:
            return DONE
        return self._event([], usage=self._usage.openai()) + DONE

    def fail(self, error: ApiError) -> bytes:
        """An error behind the first event."""
        return b"data: " + json_bytes(openai_body(error)) + b"\n\n" + DONE

    def _first(self, delta: Delta) -> bytes:
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        extra: dict[str, Any] = {}
        if self._request.return_token_ids:
            extra["prompt_token_ids"] = delta.prompt_token_ids
        if delta.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprob_maps(delta.prompt_logprobs, self._facts.names)
        return self._event([choice], **extra)

    def _rich(self, delta: Delta) -> bytes:
        text, calls, finish_reason = self._content.read(delta)
        content: dict[str, Any] = {"content": text} if text else {}
        if calls:
            content["tool_calls"] = calls
        if not content and finish_reason is None and self._num_top is None and not self._request.return_token_ids:
            return b""
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": content,
            "logprobs": self._logprobs(delta),
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        extra = {"usage": self._usage.openai()} if self._request.counts_always else {}
        return self._event([choice], **extra)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._num_top is None or not delta.logprobs:
            return None
        return chat_logprobs(delta.token_ids, delta.logprobs, self._facts.names, self._num_top)

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return b"data: " + json_bytes({**self._head, "choices": choices, **extra}) + b"\n\n"
