"""Prompts as HTTP bodies hold them: a text, token ids, or a list of either. Pure.

Owns: telling these apart, and how many one request may hold. Never does: look at the vocabulary (the frontend does).
"""

from __future__ import annotations

from typing import Any, Final

from procengine.client_bodies import Body
from procengine.errors import InvalidRequestError

__all__ = ["MAX_PROMPTS", "prompt_bodies"]

MAX_PROMPTS: Final = 2048


def prompt_bodies(field: str, prompt: str | list[Any]) -> list[Body]:
    """One body a prompt, in order.

    Raises:
        InvalidRequestError: it is neither, or holds nothing; names the field.
    """
    if isinstance(prompt, str):
        return [_body(field, prompt)]
    if not prompt:
        raise InvalidRequestError(f"{field}: must not be empty")
    if not isinstance(prompt[0], str | list):
        return [_body(field, prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"{field}: holds {len(prompt)} prompts, the limit is {MAX_PROMPTS}")
    return [_body(f"{field}[{index}]", one) for index, one in enumerate(prompt)]


def _body(field: str, prompt: Any) -> Body:
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError(f"{field}: must not be empty")
        return {"prompt": prompt}
    if not isinstance(prompt, list):
        raise InvalidRequestError(f"{field}: must be a string or a list of token ids, got {prompt!r}")
    if not prompt:
        raise InvalidRequestError(f"{field}: must not be empty")
    if set(map(type, prompt)) != {int}:
        at, wrong = next((at, one) for at, one in enumerate(prompt) if type(one) is not int)
        raise InvalidRequestError(f"{field}[{at}]: must be a token id, an integer, got {wrong!r}")
    return {"prompt_token_ids": prompt}
