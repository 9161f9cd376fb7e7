"""`chat.completion`: the whole answer of `/v1/chat/completions`. Pure."""

from __future__ import annotations

from typing import Any

from procengine.api.answer import AnswerFacts
from procengine.api.chat_request import ChatRequest
from procengine.api.choices import Choice, choices_of, prompt_ids_of, prompt_logprobs_of
from procengine.api.exchange import Response
from procengine.api.json_body import json_bytes
from procengine.api.logprobs import chat_logprobs, prompt_logprob_maps
from procengine.api.usage import UsageCounter
from procengine.messages import Delta, Embedding

__all__ = ["chat_answer"]


def chat_answer(
    request: ChatRequest, facts: AnswerFacts, style: str | None, prompts: list[list[Delta | Embedding]]
) -> Response:
    """The answer, from what came for the one prompt."""
    (items,) = prompts
    usage = UsageCounter()
    usage.add_all(0, (item for item in items if isinstance(item, Delta)))
    answer: dict[str, Any] = {
        "id": facts.answer_id,
        "object": "chat.completion",
        "created": facts.created_s,
        "model": facts.model,
        "choices": [_choice(request, facts, style, choice) for choice in choices_of(items)],
        "usage": usage.openai(),
    }
    if request.return_token_ids:
        answer["prompt_token_ids"] = prompt_ids_of(items)
    if (of_prompt := prompt_logprobs_of(items)) is not None:
        answer["prompt_logprobs"] = prompt_logprob_maps(of_prompt, facts.names)
    return Response(200, json_bytes(answer))


def _choice(request: ChatRequest, facts: AnswerFacts, style: str | None, choice: Choice) -> dict[str, Any]:
    content, calls, finish_reason = choice.with_calls(style, facts.call_seed, request.parallel_tool_calls)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = calls
    num_top = request.num_logprobs
    logprobs = None
    if num_top is not None and choice.logprobs is not None:
        logprobs = chat_logprobs(choice.token_ids, choice.logprobs, facts.names, num_top)
    shown: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if request.return_token_ids:
        shown["token_ids"] = choice.token_ids
    return shown
