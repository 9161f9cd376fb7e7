"""`Postprocessor`: the output process's part of a workflow: results of workers in, messages for clients out.

Owns: the interface. Pure: an implementation touches no socket and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from procengine.messages import Delta, Embedding, Register, RequestTimes

__all__ = ["EndedRequest", "Item", "NoteKey", "Postprocessor", "TakenItems", "noting"]

Item = Delta | Embedding
NoteKey = Callable[[int], None]  # told whose text is worked on next, in case that is the death of the process
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request (one choice) that is over, for those who keep the books."""

    key: int
    finish_reason: str
    times: RequestTimes
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class TakenItems:
    """What `take_items` gives: messages by client, the requests that a stop string ended, and all that ended."""

    items_by_client: dict[bytes, list[Item]] = field(default_factory=dict)
    text_stopped_keys: list[int] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)

    def add(self, client: bytes, item: Item) -> None:
        """One more message for a client."""
        self.items_by_client.setdefault(client, []).append(item)

    def extend(self, other: TakenItems) -> None:
        """Take in what another workflow, or a later call, gave."""
        if not self.items_by_client:
            self.items_by_client = other.items_by_client
        else:
            for client, items in other.items_by_client.items():
                self.items_by_client.setdefault(client, []).extend(items)
        self.text_stopped_keys += other.text_stopped_keys
        self.ended += other.ended


class Postprocessor(Protocol):
    """All running requests of one workflow. Results are taken in one by one and come out together."""

    @property
    def num_unfinished(self) -> int:
        """Requests registered and not ended."""
        ...

    def register(self, message: Register) -> list[tuple[int, int]]:
        """Take up a request; one that is known already stays as it is. Returns (key, position) of each gap found: a
        result may have come before it."""
        ...

    def admit(self, key: int, num_cached_tokens: int, num_preemptions: int = 0, sent_ns: int = 0) -> None:
        """A request got a slot, with this much of its prompt in the cache, in a step sent then, after so many
        preemptions."""
        ...

    def take_result(self, header: Any, payload: NDArray[np.int32]) -> list[tuple[int, int]]:
        """Take in a result. Returns (key, position) of each gap found."""
        ...

    def replay(self, key: int, position: int, token_ids: list[int]) -> list[tuple[int, int]]:
        """Take in tokens that were missing; those already known are dropped. Returns gaps that are still there."""
        ...

    def take_items(self, received_ns: int = 0, note_key: NoteKey | None = None) -> TakenItems:
        """Everything that is new since the last call, as messages; the newest result came at `received_ns`."""
        ...

    def finish(self, key: int, finish_reason: str, error: str | None = None) -> tuple[bytes, list[Item]] | None:
        """End a request from outside (abort, error): its client and last messages; None if it has ended already."""
        ...

    def keys_of_client(self, client: bytes) -> list[int]:
        """Running requests of one client."""
        ...

    def clients(self) -> Iterator[tuple[bytes, bool]]:
        """The client of each running request, and whether that has had its first step."""
        ...

    def all_keys(self) -> list[int]:
        """Running requests."""
        ...


def noting(entries: Iterable[tuple[int, ValueT]], note_key: NoteKey) -> Iterator[tuple[int, ValueT]]:
    """The same entries, each with a note of its key before it is worked on; behind the last, one of nobody's (-1)."""
    for entry in entries:
        note_key(entry[0])
        yield entry
    note_key(-1)
