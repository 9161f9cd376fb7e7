"""`AnswerFacts`: what every answer to one request says of it and of the server. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from procengine.api.logprobs import TokenNames

__all__ = ["AnswerFacts"]


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """Attributes:
    answer_id: what the answer is called.
    created_s: seconds since 1970.
    model: what the server calls the model.
    names: what its tokens are called.
    call_seed: tells this request's tool calls from all others.
    """

    answer_id: str
    created_s: int
    model: str
    names: TokenNames
    call_seed: str
