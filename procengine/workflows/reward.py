"""The `reward` workflow in the frontend: the number that a model with one label gives, as it is.

Owns: what a client may ask. Never does: compute; `procengine.label_scores` and `procengine.label_head` do.
"""

from __future__ import annotations

from procengine.messages import Register
from procengine.workflows.prefill_only import PrefillBody, PrefillPlanner, PrefillRequest, make_request, register_as
from procengine.workflows.prompt import Identity, ModelFacts, Prepared

__all__ = ["RewardBody", "RewardPlanner", "accept", "register"]


class RewardBody(PrefillBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client submits."""


class RewardPlanner(PrefillPlanner):
    """See `PrefillPlanner`."""

    workflow = "reward"


def accept(body: RewardBody, prepared: Prepared, facts: ModelFacts, identity: Identity) -> list[PrefillRequest]:
    """The one request of a body that can run. Raises InvalidRequestError."""
    return [make_request(body, prepared, facts, identity, (0,), in_pieces=facts.is_causal)]


def register(request: PrefillRequest, body: RewardBody) -> Register:
    """What the output process needs to know about an accepted request."""
    return register_as("reward", request)
