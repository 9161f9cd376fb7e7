"""The workflows `embed_sparse` and `embed_multi` in the frontend: something of each token instead of one vector of all.

Owns: what a client may ask, which is the same of both. Never does: compute; `procengine.token_heads` does, and
`procengine.lexical_outputs` says what weights belong to which token.
"""

from __future__ import annotations

from procengine.messages import Register
from procengine.workflows.prefill_only import PrefillBody, PrefillPlanner, PrefillRequest, make_request, register_as
from procengine.workflows.prompt import Identity, ModelFacts, Prepared

__all__ = [
    "EmbedMultiPlanner",
    "EmbedSparsePlanner",
    "EmbedTokensBody",
    "accept",
    "register_multi",
    "register_sparse",
]


class EmbedTokensBody(PrefillBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client submits."""


class EmbedSparsePlanner(PrefillPlanner):
    """See `PrefillPlanner`."""

    workflow = "embed_sparse"


class EmbedMultiPlanner(PrefillPlanner):
    """See `PrefillPlanner`."""

    workflow = "embed_multi"


def accept(body: EmbedTokensBody, prepared: Prepared, facts: ModelFacts, identity: Identity) -> list[PrefillRequest]:
    """The one request of a body that can run. Raises InvalidRequestError."""
    return [make_request(body, prepared, facts, identity)]


def register_sparse(request: PrefillRequest, _body: EmbedTokensBody) -> Register:
    """What the output process needs to know about an accepted request."""
    return register_as("embed_sparse", request)


def register_multi(request: PrefillRequest, _body: EmbedTokensBody) -> Register:
    """What the output process needs to know about an accepted request."""
    return register_as("embed_multi", request)
