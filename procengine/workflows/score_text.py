"""The `score_text` workflow in the frontend: how likely a model finds each token of a text.

Owns: what a client may ask. Never does: compute; `procengine.text_scores` does.
"""

from __future__ import annotations

from procengine.errors import InvalidRequestError
from procengine.messages import Register
from procengine.workflows.prefill_only import PrefillBody, PrefillPlanner, PrefillRequest, make_request, register_as
from procengine.workflows.prompt import Identity, ModelFacts, Prepared

__all__ = ["ScoreTextBody", "ScoreTextPlanner", "accept", "register"]


class ScoreTextBody(PrefillBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client submits: one text, its tokens, or a conversation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("text_pair", "prompt_name"):
            if getattr(self, field) is not None:
                raise InvalidRequestError(f"{field}: has no meaning for score_text, which scores a text as it stands")

    @property
    def takes_named_prompt(self) -> bool:
        return False


class ScoreTextPlanner(PrefillPlanner):
    """See `PrefillPlanner`."""

    workflow = "score_text"


def accept(body: ScoreTextBody, prepared: Prepared, facts: ModelFacts, identity: Identity) -> list[PrefillRequest]:
    """The one request of a body that can run. Raises InvalidRequestError."""
    return [make_request(body, prepared, facts, identity, in_pieces=facts.is_causal)]


def register(request: PrefillRequest, body: ScoreTextBody) -> Register:
    """What the output process needs to know about an accepted request."""
    return register_as("score_text", request)
