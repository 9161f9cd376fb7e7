"""`text_completion`: the answers of `/v1/completions`, whole and as events. Pure.

Owns: both shapes. Choice j of prompt i has the index i * n + j. Never does: know who reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procengine.api.answer import AnswerFacts
from procengine.api.chat_stream import DONE
from procengine.api.choices import Choice, choices_of, prompt_ids_of, prompt_logprobs_of
from procengine.api.completion_request import CompletionRequest
from procengine.api.errors import ApiError, openai_body
from procengine.api.exchange import Response
from procengine.api.json_body import json_bytes
from procengine.api.logprobs import completion_logprobs, prompt_logprob_maps
from procengine.api.usage import UsageCounter
from procengine.messages import Delta, Embedding, TokenLogprobs

__all__ = ["CompletionStream", "completion_answer"]


class CompletionStream:
    """One answer's events."""

    is_anthropic = False

    def __init__(self, request: CompletionRequest, facts: AnswerFacts) -> None:
        self._request = request
        self._facts = facts
        self._num_choices = request.n or 1
        self._usage = UsageCounter()
        self._offsets: dict[int, int] = {}  # where in a choice's text its next token begins
        self._of_prompt: dict[int, list[TokenLogprobs | None]] = {}
        self._is_rich = (
            request.logprobs is not None
            or request.prompt_logprobs is not None
            or bool(request.return_token_ids)
            or request.counts_always
        )
        self._head = _head(facts)
        self._prefix = b"data: " + json_bytes(self._head)[:-1] + b',"choices":[{"index":'

    def take(self, prompt: int, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas."""
        parts: list[bytes] = []
        for delta in deltas:
            self._usage.add(prompt, delta)
            index = prompt * self._num_choices + delta.index
            if self._is_rich or delta.finish_reason is not None:
                parts.append(self._rich(prompt, index, delta))
            elif delta.text:
                parts.append(
                    b'%b%d,"text":%b,"logprobs":null,"finish_reason":null}]}\n\n'
                    % (self._prefix, index, json_bytes(delta.text))
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

    def _rich(self, prompt: int, index: int, delta: Delta) -> bytes:
        request = self._request
        if delta.prompt_logprobs is not None:
            self._of_prompt[prompt] = delta.prompt_logprobs
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": None if request.logprobs is None else self._logprobs(prompt, index, delta),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if delta.prompt_logprobs is not None and request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprob_maps(delta.prompt_logprobs, self._facts.names)
        if request.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.prompt_token_ids is not None:
                choice["prompt_token_ids"] = delta.prompt_token_ids
        extra = {"usage": self._usage.openai()} if request.counts_always else {}
        return self._event([choice], **extra)

    def _logprobs(self, prompt: int, index: int, delta: Delta) -> dict[str, Any] | None:
        ids: list[int] = delta.token_ids if delta.logprobs else []
        positions: list[TokenLogprobs | None] = list(delta.logprobs or ())
        if self._request.shows_prompt_logprobs and delta.prompt_token_ids is not None and prompt in self._of_prompt:
            ids = [*delta.prompt_token_ids, *ids]
            positions = [*self._of_prompt[prompt], *positions]
        if not ids:
            return None
        shown, self._offsets[index] = completion_logprobs(
            ids, positions, self._facts.names, self._request.logprobs or 0, self._offsets.get(index, 0)
        )
        return shown

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return b"data: " + json_bytes({**self._head, "choices": choices, **extra}) + b"\n\n"


def completion_answer(
    request: CompletionRequest, facts: AnswerFacts, prompts: list[list[Delta | Embedding]]
) -> Response:
    """The whole answer, from what came for each prompt."""
    usage = UsageCounter()
    choices: list[dict[str, Any]] = []
    for prompt, items in enumerate(prompts):
        usage.add_all(prompt, (item for item in items if isinstance(item, Delta)))
        first = prompt * (request.n or 1)
        choices += [_choice(request, facts, first + one.index, one, items) for one in choices_of(items)]
    return Response(200, json_bytes({**_head(facts), "choices": choices, "usage": usage.openai()}))


def _choice(
    request: CompletionRequest, facts: AnswerFacts, index: int, choice: Choice, items: list[Delta | Embedding]
) -> dict[str, Any]:
    of_prompt = prompt_logprobs_of(items)
    shown: dict[str, Any] = {
        "index": index,
        "text": choice.text,
        "logprobs": None if request.logprobs is None else _logprobs(request, facts, choice, items),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if of_prompt is not None and request.prompt_logprobs is not None:
        shown["prompt_logprobs"] = prompt_logprob_maps(of_prompt, facts.names)
    if request.return_token_ids:
        shown |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt_ids_of(items)}
    return shown


def _logprobs(
    request: CompletionRequest, facts: AnswerFacts, choice: Choice, items: list[Delta | Embedding]
) -> dict[str, Any]:
    ids = choice.token_ids if choice.logprobs is not None else []
    positions: list[TokenLogprobs | None] = list(choice.logprobs or ())
    of_prompt = prompt_logprobs_of(items) if request.shows_prompt_logprobs else None
    if of_prompt is not None:
        ids, positions = [*prompt_ids_of(items), *ids], [*of_prompt, *positions]
    return completion_logprobs(ids, positions, facts.names, request.logprobs or 0, 0)[0]


def _head(facts: AnswerFacts) -> dict[str, Any]:
    return {
        "id": facts.answer_id,
        "object": "text_completion",
        "created": facts.created_s,
        "model": facts.model,
    }
