"""`Submission`: a request on its way from a client's message to the engine, and what its deadlines are about.

Owns: what is known of it at the door. Never does: check or accept it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from procengine.messages import Submit
from procengine.workflows.prompt import PromptBody

__all__ = ["Submission"]


@dataclass(slots=True, eq=False)
class Submission:
    """One `Submit` that passed the door.

    Attributes:
        received_ns: when it came (CLOCK_MONOTONIC).
        was_aborted: its client gave it up while its text was being tokenized.
        keys: of its choices, once it is accepted.
    """

    client: bytes
    message: Submit
    body: PromptBody
    received_ns: int
    was_aborted: bool = False
    keys: list[int] = field(default_factory=list)

    @property
    def owner(self) -> tuple[bytes, str]:
        """What tells it from all others that have not ended."""
        return self.client, self.message.request_id
