"""The `score` workflow in the frontend: how well two texts go together, by a model with one label.

Owns: what a client may ask. Never does: compute; `procengine.label_scores` and `procengine.label_head` do.
"""

from __future__ import annotations

from procengine.messages import Register
from procengine.workflows.prefill_only import PrefillBody, PrefillPlanner, PrefillRequest, make_request, register_as
from procengine.workflows.prompt import Identity, ModelFacts, Prepared

__all__ = ["ScoreBody", "ScorePlanner", "accept", "register"]


class ScoreBody(PrefillBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client submits: two texts, `prompt` and `text_pair`, or the tokens of both.

    Attributes:
        use_activation: scores as the model's files say (sigmoid); False: the logit.
        instruction: how a document is to answer a query, for a model whose template has a place for it.
    """

    use_activation: bool = True
    instruction: str | None = None

    @property
    def is_query_and_document(self) -> bool:
        return self.text_pair is not None

    @property
    def instruction_for_pair(self) -> str | None:
        return self.instruction


class ScorePlanner(PrefillPlanner):
    """See `PrefillPlanner`."""

    workflow = "score"


def accept(body: ScoreBody, prepared: Prepared, facts: ModelFacts, identity: Identity) -> list[PrefillRequest]:
    """The one request of a body that can run. Raises InvalidRequestError."""
    options = (int(body.use_activation),)
    return [make_request(body, prepared, facts, identity, options, in_pieces=facts.is_causal)]


def register(request: PrefillRequest, body: ScoreBody) -> Register:
    """What the output process needs to know about an accepted request."""
    return register_as("score", request)
