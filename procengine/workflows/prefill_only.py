"""What workflows without generation have in common in the frontend: independent sequences, batched by token budget,
nothing kept on the device.

Owns: the body's fields that all of them take, one request's sequence, and the queue. Never does: hold KV blocks or
slots: it has none. A workflow is a body, an `accept` and a planner with its name (docs/WORKFLOWS.md).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from procengine.errors import InvalidRequestError
from procengine.messages import EmbedInput, EmbedResult, Register
from procengine.pipeline import Gauges, PlannedStep
from procengine.scheduler.counters import SchedulerCounters
from procengine.scheduler.limits import SchedulerLimits
from procengine.step_payload import EMBED_SECTIONS, pack_sections
from procengine.workflows.prompt import Identity, ModelFacts, Prepared, PromptBody, check_prompt

__all__ = ["PrefillBody", "PrefillPlanner", "PrefillRequest", "make_request", "register_as"]

Int32s = NDArray[np.int32]


class PrefillBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client submits.

    Attributes:
        text_pair: a second text, which the model reads behind the prompt and apart from it.
        prompt_name: which of the model's prompts goes before the text; None: its default one, if it has that.
        truncate_prompt_tokens: keep the first so many tokens, special ones included; -1: as many as the group takes.
            None: what is too long is an error.
    """

    text_pair: str | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("text_pair", "prompt_name"):
            if getattr(self, field) is not None and self.prompt is None:
                raise InvalidRequestError(f"{field}: can only be given with a prompt that is a text")
        if self.truncate_prompt_tokens is not None and not (
            self.truncate_prompt_tokens == -1 or self.truncate_prompt_tokens > 0
        ):
            raise InvalidRequestError(
                f"truncate_prompt_tokens: must be -1 or at least 1, got {self.truncate_prompt_tokens}"
            )

    @property
    def second_text(self) -> str | None:
        return self.text_pair

    @property
    def named_prompt(self) -> str | None:
        return self.prompt_name

    @property
    def takes_named_prompt(self) -> bool:
        return True

    @property
    def max_tokens_kept(self) -> int | None:
        return self.truncate_prompt_tokens

    @property
    def may_be_truncated(self) -> bool:
        """Whether a prompt longer than the context is fine, because only its beginning counts."""
        return self.truncate_prompt_tokens is not None


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """One sequence. `token_ids` is int32 [n]; `token_types` too, and None where all are 0; `options` say what is made
    of it, and only requests of the same options share a step."""

    key: int
    client: bytes
    request_id: str
    token_ids: Int32s
    is_finished: bool = False
    num_cached_tokens: int | None = 0
    num_preemptions: int = 0
    num_worker_deaths: int = 0
    token_types: Int32s | None = None
    options: tuple[int, ...] = ()
    in_pieces: bool = False  # over several steps, if it is too long for one
    num_planned: int = 0  # tokens that are in steps, of a sequence that comes in pieces


class Piece(NamedTuple):
    """Tokens of a sequence that is too long for one step, all of them behind `start` that fit."""

    request: PrefillRequest
    start: int
    end: int


def make_request(
    body: PrefillBody,
    prepared: Prepared,
    facts: ModelFacts,
    identity: Identity,
    options: tuple[int, ...] = (),
    *,
    in_pieces: bool = False,
) -> PrefillRequest:
    """The request of a body that can run; `in_pieces`: over several steps, if it is too long for one.

    Raises:
        InvalidRequestError: the prompt is empty, too long for the model or for one step, or not of this model.
    """
    token_ids, limit = prepared.token_ids, body.truncate_prompt_tokens
    if limit is not None:  # texts were cut when they became tokens
        token_ids = token_ids[: facts.max_model_len if limit == -1 else limit]
    prompt = check_prompt(token_ids, facts)
    if len(prompt) > facts.max_embed_tokens and not in_pieces:
        raise InvalidRequestError(
            f"prompt: has {len(prompt)} tokens, one step takes at most {facts.max_embed_tokens} of a sequence that is "
            "not cut (max_num_batched_tokens)"
        )
    types = None if prepared.token_types is None else np.array(prepared.token_types, np.int32)
    if types is not None and int(types.max()) >= facts.num_token_types:
        types = None  # of a tokenizer that tells texts apart for a model that does not
    return PrefillRequest(
        identity.key,
        identity.client,
        identity.request_id,
        prompt,
        token_types=types,
        options=options,
        in_pieces=in_pieces,
    )


def register_as(workflow: str, request: PrefillRequest) -> Register:
    """What the output process needs to know about an accepted request."""
    return Register(
        key=request.key,
        client=request.client,
        request_id=request.request_id,
        index=0,
        workflow=workflow,
        prompt_token_ids=request.token_ids.tolist(),
        end_position=0,
    )


class PrefillPlanner:
    """First come, first served; as many whole sequences a step as the token budget takes. One that is longer than the
    budget comes in pieces, a step each, or alone if it cannot be cut."""

    workflow: ClassVar[str]

    def __init__(self, limits: SchedulerLimits) -> None:
        self.counters = SchedulerCounters()
        self._max_tokens = limits.max_num_batched_tokens  # as of any other step: generation may wait for its end
        self._max_rows = limits.max_num_seqs
        self._waiting: deque[PrefillRequest] = deque()
        self._running: dict[int, PrefillRequest] = {}

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

    def add(self, request: PrefillRequest) -> None:
        """Queue a request."""
        request.num_planned = 0
        self._waiting.append(request)

    def finish(self, request: PrefillRequest) -> None:
        """Take a request out; a result under way for it is dropped."""
        request.is_finished = True
        self._running.pop(request.key, None)

    def take_failed(self) -> list[tuple[PrefillRequest, str]]:
        """None: a sequence that was accepted can be run."""
        return []

    def take_all(self, *, has_died: bool = True) -> list[PrefillRequest]:
        """Every unfinished request: the worker is gone, and so is this planner."""
        running, waiting = list(self._running.values()), [r for r in self._waiting if not r.is_finished]
        for request in (*running, *(r for r in waiting if r.num_planned)):
            request.num_worker_deaths += has_died
        return sorted(running + waiting, key=lambda request: (not _is_suspect(request), request.key))

    def plan(self) -> list[PrefillRequest] | Piece | None:
        """The rows of the next step, or None if nothing waits."""
        while self._waiting and self._waiting[0].is_finished:
            self._waiting.popleft()
        if self._waiting and self._waiting[0].in_pieces and len(self._waiting[0].token_ids) > self._max_tokens:
            return self._take_piece()
        rows = self._take_rows()
        self._running.update((r.key, r) for r in rows)
        return rows or None

    def build(self, plan: list[PrefillRequest] | Piece, step_id: int, epoch: int) -> PlannedStep:
        """The step of these rows."""
        return self._build_piece(plan, step_id, epoch) if isinstance(plan, Piece) else self._build(plan, step_id, epoch)

    def _build(self, rows: list[PrefillRequest], step_id: int, epoch: int) -> PlannedStep:
        lengths = np.array([len(r.token_ids) for r in rows], np.int32)
        sections = {
            "key_words": np.array([r.key for r in rows], np.int64).view(np.int32),
            "query_start_loc": np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            "input_ids": np.concatenate([r.token_ids for r in rows]),
            "positions": np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        }
        if any(r.token_types is not None for r in rows):
            sections["token_types"] = np.concatenate([_types(r) for r in rows])
        buffer = np.empty(sum(section.size for section in sections.values()), np.int32)
        payload, sizes = pack_sections(EMBED_SECTIONS, sections, buffer)
        header = EmbedInput(
            step_id,
            epoch,
            len(rows),
            int(lengths.sum()),
            int(lengths.max()),
            sizes,
            workflow=self.workflow,
            options=rows[0].options,
        )
        self.counters.prompt_tokens += header.num_tokens
        return PlannedStep(header, payload, rows, admitted=rows, is_steady=False)

    def _build_piece(self, piece: Piece, step_id: int, epoch: int) -> PlannedStep:
        request, start, end = piece
        whole = len(request.token_ids)
        sections = {
            "key_words": np.array([request.key], np.int64).view(np.int32),
            "query_start_loc": np.array([0, end - start], np.int32),
            "input_ids": request.token_ids[start:end],
            "positions": np.arange(start, end, dtype=np.int32),
        }
        buffer = np.empty(sum(section.size for section in sections.values()), np.int32)
        payload, sizes = pack_sections(EMBED_SECTIONS, sections, buffer)
        count = end - start
        header = EmbedInput(step_id, epoch, 1, count, count, sizes, self.workflow, request.options, whole)
        self.counters.prompt_tokens += count
        ends = [request] if end == whole else []
        return PlannedStep(header, payload, ends, admitted=[] if start else [request], is_steady=False)

    def apply(self, sent: object, header: EmbedResult, payload: Int32s) -> list[tuple[PrefillRequest, str]]:
        """All requests of the step are done."""
        assert isinstance(sent, list)
        ended = [request for request in sent if not request.is_finished]
        for request in ended:
            self.finish(request)
        return [(request, "stop") for request in ended]

    def history(self, request: PrefillRequest) -> Int32s:
        """All tokens of the request, int32 [n]."""
        return request.token_ids

    def count_cached_tokens(self, request: PrefillRequest) -> int:
        """None: there is no cache."""
        return 0

    def _take_piece(self) -> Piece:
        request = self._waiting[0]
        start = request.num_planned
        request.num_planned = min(start + self._max_tokens, len(request.token_ids))
        if request.num_planned == len(request.token_ids):
            self._waiting.popleft()
            self._running[request.key] = request
        return Piece(request, start, request.num_planned)

    def _take_rows(self) -> list[PrefillRequest]:
        rows: list[PrefillRequest] = []
        budget = self._max_tokens
        while self._waiting and len(rows) < self._max_rows:
            request = self._waiting[0]
            if not request.is_finished:
                if rows and (len(request.token_ids) > budget or not _go_together(rows[0], request)):
                    break
                rows.append(request)
                budget -= len(request.token_ids)
            self._waiting.popleft()
            if _is_suspect(request):
                break  # it runs alone
        return rows


def _types(request: PrefillRequest) -> Int32s:
    return np.zeros(len(request.token_ids), np.int32) if request.token_types is None else request.token_types


def _go_together(first: PrefillRequest, request: PrefillRequest) -> bool:
    return first.options == request.options and not _is_suspect(request)


def _is_suspect(request: PrefillRequest) -> bool:
    return not request.is_finished and request.num_worker_deaths > 1
