"""The `token_classify` workflow in the frontend: the scores of a model's labels for each token.

Owns: its name. Never does: say what a client may ask (`classify` does, it is the same), or compute
(`procengine.label_head` does).
"""

from __future__ import annotations

from procengine.messages import Register
from procengine.workflows.classify import ClassifyBody
from procengine.workflows.prefill_only import PrefillPlanner, PrefillRequest, register_as

__all__ = ["TokenClassifyPlanner", "register"]


class TokenClassifyPlanner(PrefillPlanner):
    """See `PrefillPlanner`."""

    workflow = "token_classify"


def register(request: PrefillRequest, body: ClassifyBody) -> Register:
    """What the output process needs to know about an accepted request."""
    return register_as("token_classify", request)
