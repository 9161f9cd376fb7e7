"""`FrontendParts`: the callables of one workflow that the frontend runs, imported together; `WorkflowParts`: by name.

Owns: their signatures. Never does: import a workflow that was not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from procengine.messages import Register
from procengine.workflows import find_workflow, load_part

__all__ = ["FrontendParts", "WorkflowParts", "load_frontend_parts"]


@dataclass(frozen=True, slots=True)
class FrontendParts:
    """See `procengine.workflows.Workflow` for what each part is."""

    decode_body: Callable[[bytes | msgspec.Raw], Any]
    accept: Callable[..., Any]
    register: Callable[[Any, Any], Register]
    planner: Callable[..., Any]
    history: Callable[[Any, Any], NDArray[np.int32]]  # (planner, request) -> all known token ids
    count_cached_tokens: Callable[[Any, Any], int]  # (planner, request) -> tokens of its prompt in the cache


def load_frontend_parts(name: str) -> FrontendParts:
    """The parts of workflow `name`."""
    workflow = find_workflow(name)
    planner = load_part(workflow.planner)
    return FrontendParts(
        decode_body=msgspec.msgpack.Decoder(load_part(workflow.body)).decode,
        accept=load_part(workflow.accept),
        register=load_part(workflow.register),
        planner=planner,
        history=planner.history,
        count_cached_tokens=planner.count_cached_tokens,
    )


class WorkflowParts(Mapping[str, FrontendParts]):
    """Those of a model's workflows, each imported when it is first looked up: a request asks for it."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._loaded: dict[str, FrontendParts] = {}

    def __getitem__(self, name: str) -> FrontendParts:
        if name not in self._loaded:
            if name not in self._names:
                raise KeyError(name)
            self._loaded[name] = load_frontend_parts(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
