"""The body of `/v1/chat/completions`, and what it asks of the group. Pure.

Owns: the fields that only this route has. Never does: render an answer.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from procengine.api.chat_messages import plain_messages
from procengine.api.conversation import conversation_body
from procengine.api.generation_fields import GenerationFields, sampling_params
from procengine.client_bodies import Body
from procengine.errors import InvalidRequestError
from procengine.tool_calls.offer import ToolOffer

__all__ = ["CHAT_DECODER", "ChatRequest", "chat_body"]

_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "echo": (False,),
    "function_call": (),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "web_search_options": (),
}


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields, vLLM's, and nothing else."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # false: one call at most
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    audio: dict[str, Any] | None = None
    best_of: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    echo: bool | None = None
    function_call: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    use_beam_search: bool | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives a token; None: no log probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequestError("top_logprobs: can only be given with logprobs, which is not true")
            return None
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise InvalidRequestError(f"top_logprobs: must be at least 0, got {self.top_logprobs}")
        return self.top_logprobs or 0


CHAT_DECODER: Final = msgspec.json.Decoder(ChatRequest)


def chat_body(request: ChatRequest, tool_call_parser: str) -> tuple[Body, ToolOffer]:
    """What is sent to the group, and how calls are read from the answer.

    Raises:
        InvalidRequestError: names the field.
    """
    request.check(_REFUSED)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    params = sampling_params(
        request, max_tokens=max_tokens, logprobs=request.num_logprobs, streams=bool(request.stream)
    )
    return conversation_body(
        plain_messages(request.messages),
        params,
        request.tools,
        request.tool_choice,
        tool_call_parser,
        request.priority,
        request.cache_salt,
        parallel=request.parallel_tool_calls is not False,
    )
