"""The `classify` workflow in the frontend: the scores of a model's labels.

Owns: what a client may ask. Never does: compute; `procengine.label_scores` and `procengine.label_head` do.
"""

from __future__ import annotations

from procengine.messages import Register
from procengine.workflows.prefill_only import PrefillBody, PrefillPlanner, PrefillRequest, make_request, register_as
from procengine.workflows.prompt import Identity, ModelFacts, Prepared

__all__ = ["ClassifyBody", "ClassifyPlanner", "accept", "register"]


class ClassifyBody(PrefillBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client submits.

    Attributes:
        use_activation: scores as the model's files say (softmax, sigmoid); False: logits.
    """

    use_activation: bool = True


class ClassifyPlanner(PrefillPlanner):
    """See `PrefillPlanner`."""

    workflow = "classify"


def accept(body: ClassifyBody, prepared: Prepared, facts: ModelFacts, identity: Identity) -> list[PrefillRequest]:
    """The one request of a body that can run. Raises InvalidRequestError."""
    options = (int(body.use_activation),)
    return [make_request(body, prepared, facts, identity, options, in_pieces=facts.is_causal)]


def register(request: PrefillRequest, body: ClassifyBody) -> Register:
    """What the output process needs to know about an accepted request."""
    return register_as("classify", request)
