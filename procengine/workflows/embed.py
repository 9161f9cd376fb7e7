"""The `embed` workflow in the frontend: a text becomes a vector, as the model's files say.

Owns: what a client may ask of the vector. Never does: pool; runners do.
"""

from __future__ import annotations

from procengine.errors import InvalidRequestError
from procengine.messages import Register
from procengine.workflows.prefill_only import PrefillBody, PrefillPlanner, PrefillRequest, make_request, register_as
from procengine.workflows.prompt import Identity, ModelFacts, Prepared

__all__ = ["EmbedBody", "EmbedPlanner", "EmbedRequest", "accept", "register"]

EmbedRequest = PrefillRequest


class EmbedBody(PrefillBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client submits. Pooling and normalisation are the model's.

    Attributes:
        dimensions: keep the first so many numbers of the vector (models trained for it: Matryoshka); a vector of length
            1 has that again.
    """

    dimensions: int | None = None


class EmbedPlanner(PrefillPlanner):
    """See `PrefillPlanner`."""

    workflow = "embed"


def accept(body: EmbedBody, prepared: Prepared, facts: ModelFacts, identity: Identity) -> list[PrefillRequest]:
    """The one request of a body that can run.

    Raises:
        InvalidRequestError: it cannot; names the field, the value and the limit.
    """
    dimensions = body.dimensions
    if dimensions is not None and not 1 <= dimensions <= facts.hidden_size:
        raise InvalidRequestError(f"dimensions: must be 1 to {facts.hidden_size}, those of the model, got {dimensions}")
    in_pieces = facts.is_causal and facts.pooling == "last"
    return [make_request(body, prepared, facts, identity, (dimensions or 0,), in_pieces=in_pieces)]


def register(request: PrefillRequest, body: EmbedBody) -> Register:
    """What the output process needs to know about an accepted request."""
    return register_as("embed", request)
