"""`AdapterTable`: which LoRA adapters there are, what they are called, and which workers have them. Pure.

Owns: names, places and numbers. A *place* is where workers keep an adapter, one of `max_loras`, and is used again; a
*number* is of one loading, and never is: it seeds the prefix cache, so the blocks of an adapter that was unloaded are
found by nobody, whatever has its name or place now. Never does: send, or read a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from procengine.errors import InvalidRequestError, UnknownAdapterError

__all__ = ["Adapter", "AdapterFacts", "AdapterTable", "unknown_adapter"]


class AdapterFacts(NamedTuple):
    """What a request must know of its adapter."""

    number: int
    place: int


@dataclass(slots=True, eq=False)
class Adapter:
    """One loading of an adapter.

    Attributes:
        ask_id: whose question is answered when it is loaded, or unloaded; -1: nobody's.
        awaits: ranks of the workers that have not said whether they have it.
        error: why a worker does not.
        is_serving: requests may name it.
        is_leaving: it is to be unloaded when no request has it any more.
    """

    name: str
    path: str
    number: int
    place: int
    ask_id: int
    awaits: set[int] = field(default_factory=set)
    error: str = ""
    is_serving: bool = False
    is_leaving: bool = False


class AdapterTable:
    """Of one frontend. Every worker has all adapters, in the same places."""

    def __init__(self, max_loras: int, num_workers: int, first_number: int) -> None:
        self._max_loras = max_loras
        self._num_workers = num_workers
        self._next_number = first_number
        self._adapters: dict[int, Adapter] = {}  # by number

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._adapters.values()))

    @property
    def facts(self) -> dict[str, AdapterFacts]:
        """Those that requests may name."""
        return {one.name: AdapterFacts(one.number, one.place) for one in self if one.is_serving and not one.is_leaving}

    @property
    def leaving(self) -> list[Adapter]:
        """Those that wait for the end of the requests that have them."""
        return [one for one in self if one.is_leaving]

    @property
    def all_loaded(self) -> bool:
        """Whether every worker has all of them."""
        return not any(one.awaits for one in self)

    def are_at(self, rank: int) -> bool:
        """Whether a worker has all of them."""
        return not any(rank in one.awaits for one in self)

    def add(self, name: str, path: str, ask_id: int = -1) -> Adapter:
        """One that all workers are to load now.

        Raises:
            InvalidRequestError: the name is taken, or there is no place left.
        """
        same = next((one for one in self if one.name == name), None)
        if same is not None:
            state = "being unloaded" if same.is_leaving else "loaded" if same.is_serving else "being loaded"
            raise InvalidRequestError(f"lora_name: {name} is {state} already; unload it first")
        vacant = set(range(self._max_loras)) - {one.place for one in self}
        if not vacant:
            raise InvalidRequestError(
                f"lora_name: {len(self._adapters)} adapters are loaded, the limit (max_loras) is {self._max_loras}; "
                "unload one first"
            )
        adapter = Adapter(name, path, self._next_number, min(vacant), ask_id, set(range(self._num_workers)))
        self._next_number += 1
        self._adapters[adapter.number] = adapter
        return adapter

    def expect(self, rank: int) -> list[Adapter]:
        """A worker has begun anew: all adapters, which it is to load."""
        for adapter in self:
            adapter.awaits.add(rank)
        return list(self)

    def take(self, rank: int, number: int, error: str | None) -> Adapter | None:
        """A worker has loaded an adapter, or not. The adapter, if it was the last one that was waited for."""
        adapter = self._adapters.get(number)
        if adapter is None or rank not in adapter.awaits:
            return None
        adapter.awaits.discard(rank)
        adapter.error = adapter.error or error or ""
        return None if adapter.awaits else adapter

    def leave(self, name: str, ask_id: int) -> Adapter:
        """No request may name it any more.

        Raises:
            UnknownAdapterError: there is none of that name.
        """
        adapter = next((one for one in self if one.name == name and one.is_serving and not one.is_leaving), None)
        if adapter is None:
            raise unknown_adapter(name, self.facts)
        adapter.is_leaving, adapter.ask_id = True, ask_id
        return adapter

    def remove(self, adapter: Adapter) -> None:
        """Nobody has it any more: its place is for others."""
        del self._adapters[adapter.number]


def unknown_adapter(name: str, known: dict[str, AdapterFacts]) -> UnknownAdapterError:
    """The error of a request that names none of these."""
    shown = ", ".join(sorted(known)[:20]) or "none"
    return UnknownAdapterError(f"lora_name: there is no adapter {name!r:.200} here; there are: {shown}")
