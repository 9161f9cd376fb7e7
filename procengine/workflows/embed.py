"""The `embed` workflow in the frontend: independent sequences, batched by token budget, nothing kept on the device.

Owns: the queue of sequences to embed. Never does: hold KV blocks or slots: it has none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from procengine.errors import InvalidRequestError
from procengine.messages import EmbedInput, EmbedResult, Register
from procengine.pipeline import Gauges, PlannedStep
from procengine.scheduler.counters import SchedulerCounters
from procengine.scheduler.limits import SchedulerLimits
from procengine.step_payload import EMBED_SECTIONS, pack_sections
from procengine.workflows.prompt import Identity, ModelFacts, Prepared, PromptBody, check_prompt

__all__ = ["EmbedBody", "EmbedPlanner", "EmbedRequest", "accept", "register"]


class EmbedBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client submits: a prompt and nothing else. Pooling and normalisation are the model's."""


@dataclass(slots=True, eq=False)
class EmbedRequest:
    """One sequence to embed. `token_ids` is int32 [n]."""

    key: int
    client: bytes
    request_id: str
    token_ids: NDArray[np.int32]
    is_finished: bool = False
    num_cached_tokens: int | None = 0
    num_preemptions: int = 0
    num_worker_deaths: int = 0


def accept(body: EmbedBody, prepared: Prepared, facts: ModelFacts, identity: Identity) -> list[EmbedRequest]:
    """The one request of a body that can run.

    Raises:
        InvalidRequestError: the prompt is empty, too long for one step, or not of this model.
    """
    prompt = check_prompt(prepared.token_ids, facts)
    if len(prompt) > facts.max_embed_tokens:
        raise InvalidRequestError(
            f"prompt: has {len(prompt)} tokens, one step embeds at most {facts.max_embed_tokens} "
            "(max_num_batched_tokens)"
        )
    return [EmbedRequest(identity.key, identity.client, identity.request_id, prompt)]


def register(request: EmbedRequest, body: EmbedBody) -> Register:
    """What the output process needs to know about an accepted request."""
    return Register(
        key=request.key,
        client=request.client,
        request_id=request.request_id,
        index=0,
        workflow="embed",
        prompt_token_ids=request.token_ids.tolist(),
        end_position=0,
    )


class EmbedPlanner:
    """First come, first served; as many whole sequences a step as the token budget takes."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.counters = SchedulerCounters()
        self._max_tokens = limits.max_embed_tokens or limits.max_num_batched_tokens
        self._max_rows = limits.max_num_seqs
        self._waiting: deque[EmbedRequest] = deque()
        self._running: dict[int, EmbedRequest] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or under way."""
        return sum(not r.is_finished for r in self._waiting) + len(self._running)

    @property
    def wants_late_plan(self) -> bool:
        """Requests do not depend on each other: the pipe may always be full, but for one that may kill the worker."""
        return any(map(_is_suspect, self._running.values())) or (bool(self._waiting) and _is_suspect(self._waiting[0]))

    @property
    def gauges(self) -> Gauges:
        """How many wait and are under way; there are no blocks."""
        return Gauges(len(self._waiting), len(self._running), 0)

    def add(self, request: EmbedRequest) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def finish(self, request: EmbedRequest) -> None:
        """Take a request out; a result under way for it is dropped."""
        request.is_finished = True
        self._running.pop(request.key, None)

    def take_failed(self) -> list[tuple[EmbedRequest, str]]:
        """None: a sequence that was accepted can be embedded."""
        return []

    def take_all(self, *, has_died: bool = True) -> list[EmbedRequest]:
        """Every unfinished request: the worker is gone, and so is this planner."""
        running, waiting = list(self._running.values()), [r for r in self._waiting if not r.is_finished]
        for request in running:
            request.num_worker_deaths += has_died
        return sorted(running + waiting, key=lambda request: (not _is_suspect(request), request.key))

    def plan(self) -> list[EmbedRequest] | None:
        """The rows of the next step, or None if nothing waits."""
        rows = self._take_rows()
        self._running.update((r.key, r) for r in rows)
        return rows or None

    def build(self, rows: list[EmbedRequest], step_id: int, epoch: int) -> PlannedStep:
        """The step of these rows."""
        lengths = np.array([len(r.token_ids) for r in rows], np.int32)
        sections = {
            "key_words": np.array([r.key for r in rows], np.int64).view(np.int32),
            "query_start_loc": np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            "input_ids": np.concatenate([r.token_ids for r in rows]),
            "positions": np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        }
        buffer = np.empty(sum(section.size for section in sections.values()), np.int32)
        payload, sizes = pack_sections(EMBED_SECTIONS, sections, buffer)
        header = EmbedInput(step_id, epoch, len(rows), int(lengths.sum()), int(lengths.max()), sizes)
        self.counters.prompt_tokens += header.num_tokens
        return PlannedStep(header, payload, rows, admitted=rows, is_steady=False)

    def apply(self, sent: object, header: EmbedResult, payload: NDArray[np.int32]) -> list[tuple[EmbedRequest, str]]:
        """All requests of the step are done."""
        assert isinstance(sent, list)
        ended = [request for request in sent if not request.is_finished]
        for request in ended:
            self.finish(request)
        return [(request, "stop") for request in ended]

    def history(self, request: EmbedRequest) -> NDArray[np.int32]:
        """All tokens of the request, int32 [n]."""
        return request.token_ids

    def count_cached_tokens(self, request: EmbedRequest) -> int:
        """None: there is no cache."""
        return 0

    def _take_rows(self) -> list[EmbedRequest]:
        rows: list[EmbedRequest] = []
        budget = self._max_tokens
        while self._waiting and len(rows) < self._max_rows:
            request = self._waiting[0]
            if not request.is_finished:
                if len(request.token_ids) > budget or (_is_suspect(request) and rows):
                    break
                rows.append(request)
                budget -= len(request.token_ids)
            self._waiting.popleft()
            if _is_suspect(request):
                break  # it runs alone
        return rows


def _is_suspect(request: EmbedRequest) -> bool:
    return not request.is_finished and request.num_worker_deaths > 1
