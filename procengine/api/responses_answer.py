"""`response`: the whole answer of `/v1/responses` and its events. Pure.

Owns: output items (a message, then calls), and the order of events. Never does: keep an answer, or know who reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procengine.api.answer import AnswerFacts
from procengine.api.choices import choices_of
from procengine.api.conversation import ContentStream
from procengine.api.errors import ApiError
from procengine.api.exchange import Response
from procengine.api.json_body import json_bytes
from procengine.api.responses_request import ResponsesRequest
from procengine.api.usage import UsageCounter
from procengine.messages import Delta, Embedding
from procengine.tool_calls.calls import ToolCallDelta

__all__ = ["ResponsesStream", "responses_answer"]


class ResponsesStream:
    """One answer's events."""

    is_anthropic = False

    def __init__(self, request: ResponsesRequest, facts: AnswerFacts, style: str | None) -> None:
        self._request = request
        self._facts = facts
        self._usage = UsageCounter()
        self._content = ContentStream(style, facts.call_seed, parallel=request.parallel_tool_calls is not False)
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # the last one may be open
        self._open: str | int | None = None  # "message", or the index of a call
        self._finish_reason = "stop"

    def take(self, prompt: int, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas."""
        parts: list[bytes] = []
        if not self._num_events:
            begun = _response(self._request, self._facts, "in_progress", [], None)
            parts = [
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
            ]
        for delta in deltas:
            self._usage.add(prompt, delta)
            text, calls, finish_reason = self._content.read(delta)
            if text:
                parts += self._text(text)
            for call in calls:
                parts += self._call(call)
            self._finish_reason = finish_reason or self._finish_reason
        return b"".join(parts)

    def finish(self) -> bytes:
        """The end, with the whole answer."""
        parts = self._close()
        status = _status(self._finish_reason)
        whole = _response(self._request, self._facts, status, self._items, self._usage, self._finish_reason)
        return b"".join([*parts, self._event(f"response.{status}", response=whole)])

    def fail(self, error: ApiError) -> bytes:
        """An error behind the first event."""
        whole = _response(self._request, self._facts, "failed", self._items, self._usage)
        whole["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=whole)

    def _text(self, text: str) -> list[bytes]:
        parts: list[bytes] = []
        if self._open != "message":
            parts = self._close()
            item = _message_item(self._facts, len(self._items), "", "in_progress")
            self._items.append(item)
            self._open = "message"
            part = item["content"][0]
            parts.append(self._event("response.output_item.added", output_index=self._at, item=item | {"content": []}))
            parts.append(self._part_event("response.content_part.added", part=part))
        self._items[-1]["content"][0]["text"] += text
        parts.append(self._part_event("response.output_text.delta", delta=text, logprobs=[]))
        return parts

    def _call(self, call: ToolCallDelta) -> list[bytes]:
        parts: list[bytes] = []
        if self._open != call.index:
            parts = self._close()
            item = _call_item(self._facts, len(self._items), call.id, call.function.name, "", "in_progress")
            self._items.append(item)
            self._open = call.index
            parts.append(self._event("response.output_item.added", output_index=self._at, item=item))
        if call.function.arguments:
            self._items[-1]["arguments"] += call.function.arguments
            parts.append(self._item_event("response.function_call_arguments.delta", delta=call.function.arguments))
        return parts

    def _close(self) -> list[bytes]:
        """The end of the open item."""
        if self._open is None:
            return []
        item = self._items[-1]
        item["status"] = "completed"
        if self._open == "message":
            part = item["content"][0]
            parts = [
                self._part_event("response.output_text.done", text=part["text"], logprobs=[]),
                self._part_event("response.content_part.done", part=part),
            ]
        else:
            done = {"arguments": item["arguments"], "name": item["name"]}
            parts = [self._item_event("response.function_call_arguments.done", **done)]
        self._open = None
        return [*parts, self._event("response.output_item.done", output_index=self._at, item=item)]

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=self._at, **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json_bytes({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def responses_answer(
    request: ResponsesRequest, facts: AnswerFacts, style: str | None, prompts: list[list[Delta | Embedding]]
) -> Response:
    """The whole answer."""
    (items,) = prompts
    usage = UsageCounter()
    usage.add_all(0, (item for item in items if isinstance(item, Delta)))
    (choice,) = choices_of(items)
    text, calls, finish_reason = choice.with_calls(style, facts.call_seed, request.parallel_tool_calls)
    output = [_message_item(facts, 0, text, "completed")] if text or not calls else []
    output += [
        _call_item(facts, len(output) + at, one.id, one.function.name, one.function.arguments, "completed")
        for at, one in enumerate(calls)
    ]
    status = _status(finish_reason or "stop")
    return Response(200, json_bytes(_response(request, facts, status, output, usage, finish_reason or "stop")))


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason in ("length", "abort") else "completed"


def _message_item(facts: AnswerFacts, at: int, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item_id = f"msg_{facts.answer_id.removeprefix('resp_')}_{at}"
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def _call_item(
    facts: AnswerFacts, at: int, call_id: str | None, name: str | None, arguments: str, status: str
) -> dict[str, Any]:
    return {
        "id": f"fc_{facts.answer_id.removeprefix('resp_')}_{at}",
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def _response(
    request: ResponsesRequest,
    facts: AnswerFacts,
    status: str,
    output: list[dict[str, Any]],
    usage: UsageCounter | None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    reason = {"length": "max_output_tokens", "abort": "aborted"}.get(finish_reason or "")
    wanted = request.text.format if request.text is not None else None
    return {
        "id": facts.answer_id,
        "object": "response",
        "created_at": facts.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None if reason is None else {"reason": reason},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": facts.model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"} if wanted is None else wanted},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None if usage is None else _usage(usage),
        "user": request.user,
    }


def _usage(usage: UsageCounter) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
