"""The `hidden_states` workflow in the frontend: what a layer made of a text's tokens.

Owns: which layer, and of which tokens. Never does: compute.
"""

from __future__ import annotations

from typing import Final, Literal

from procengine.errors import InvalidRequestError
from procengine.messages import Register
from procengine.workflows.prefill_only import PrefillBody, PrefillPlanner, PrefillRequest, make_request, register_as
from procengine.workflows.prompt import Identity, ModelFacts, Prepared

__all__ = ["TOKENS", "HiddenStatesBody", "HiddenStatesPlanner", "accept", "register"]

TOKENS: Final = ("all", "last", "first")


class HiddenStatesBody(PrefillBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client submits.

    Attributes:
        layer: 0 is what goes into the first layer, 1 what comes out of it, ...; -1 is what the model gives.
        tokens: of which tokens.
    """

    layer: int = -1
    tokens: Literal["all", "last", "first"] = "all"


class HiddenStatesPlanner(PrefillPlanner):
    """See `PrefillPlanner`."""

    workflow = "hidden_states"


def accept(body: HiddenStatesBody, prepared: Prepared, facts: ModelFacts, identity: Identity) -> list[PrefillRequest]:
    """The one request of a body that can run. Raises InvalidRequestError."""
    most = facts.num_layers
    if not -most - 1 <= body.layer <= most:
        raise InvalidRequestError(f"layer: must be {-most - 1} to {most}, got {body.layer}")
    layer = body.layer if body.layer >= 0 else body.layer + most + 1
    # Of the first token the last piece knows nothing, and pieces go through all layers.
    in_pieces = facts.is_causal and layer == most and body.tokens != "first"
    options = (layer, TOKENS.index(body.tokens))
    return [make_request(body, prepared, facts, identity, options, in_pieces=in_pieces)]


def register(request: PrefillRequest, body: HiddenStatesBody) -> Register:
    """What the output process needs to know about an accepted request."""
    return register_as("hidden_states", request)
