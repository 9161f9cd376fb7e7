"""The body of `/v1/completions`, and what it asks of the group. Pure.

Owns: the fields that only this route has. Never does: render an answer.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from procengine.api.generation_fields import GenerationFields, sampling_params
from procengine.api.prompts import prompt_bodies
from procengine.client_bodies import Body, generate_body

__all__ = ["COMPLETION_DECODER", "CompletionRequest", "completion_bodies"]

_DEFAULT_MAX_TOKENS: Final = 16
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "prompt_embeds": (),
    "suffix": ("",),
    "use_beam_search": (False,),
}


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields, vLLM's, and nothing else."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    prompt_embeds: Any = None
    suffix: str | None = None
    use_beam_search: bool | None = None

    @property
    def shows_prompt_logprobs(self) -> bool:
        """Whether the log probabilities begin with those of the prompt, as the text does."""
        return bool(self.echo) and self.logprobs is not None


COMPLETION_DECODER: Final = msgspec.json.Decoder(CompletionRequest)


def completion_bodies(request: CompletionRequest) -> list[Body]:
    """What is sent to the group, one body a prompt.

    Raises:
        InvalidRequestError: names the field.
    """
    request.check(_REFUSED)
    extra: dict[str, Any] = {}
    if request.shows_prompt_logprobs and request.prompt_logprobs is None:
        extra["prompt_logprobs"] = request.logprobs
    max_tokens = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    params = sampling_params(
        request, max_tokens=max_tokens, logprobs=request.logprobs, streams=bool(request.stream), **extra
    )
    return [
        generate_body(body, params, request.priority or 0, request.cache_salt or "", echo=bool(request.echo))
        for body in prompt_bodies("prompt", request.prompt)
    ]
