"""`Engine`: all accepted requests of the group and the pipelines of its workers. The pure centre of the frontend.

Owns: request keys, who asked for what, which worker serves it. Never does: send, receive, tokenize, read a clock or a
random source. What others must hear of (Register, Finish, Replay) is returned as messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from procengine.errors import OverloadedError
from procengine.messages import Admitted, EmbedResult, Finish, Register, Replay, StepFailed, StepResult, encode
from procengine.output_ledger import LedgerEntry, OutputLedger
from procengine.output_suspects import OutputSuspects
from procengine.pipeline import AnyRequest, Applied, Pipeline, PlannedStep
from procengine.recent_results import RecentResults, first_logprob_positions
from procengine.request import NO_ADAPTER, Request
from procengine.workflows.parts import FrontendParts
from procengine.workflows.prompt import ModelFacts, Prepared

__all__ = ["Engine", "RequestIdentity"]


_MAX_WORKER_DEATHS = 2  # at one place of a request, before it is taken for their cause


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What the frontend adds to a client's body."""

    key: int
    client: bytes
    request_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class _Placed:
    """An accepted request and where it runs."""

    request: AnyRequest
    workflow: str
    pipeline: Pipeline


class Engine:
    """Requests in, steps out; results in, ends out."""

    def __init__(
        self, parts: Mapping[str, FrontendParts], pipelines: list[Pipeline], facts: ModelFacts, first_key: int = 0
    ) -> None:
        self.pipelines = pipelines
        self.facts = facts
        self._parts = parts
        self._placed_by_key: dict[int, _Placed] = {}
        self._keys_by_client: dict[bytes, dict[str, list[int]]] = {}  # client -> request id -> its choices
        self._waiting_tokens: dict[int, int] = {}  # prompt tokens of each request that has not started
        self.num_waiting_tokens = 0
        self.num_ended = 0
        self._ledger = OutputLedger()
        self._next_key = first_key
        self._suspects = OutputSuspects()

    @property
    def num_unfinished(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._placed_by_key)

    @property
    def num_undelivered(self) -> int:
        """Requests that have ended and whose clients may not know it yet."""
        return self._ledger.num_undelivered

    def is_running(self, client: bytes, request_id: str) -> bool:
        """Whether the client has an unfinished request of that name."""
        return request_id in self._keys_by_client.get(client, ())

    def num_of_client(self, client: bytes) -> int:
        """Unfinished requests of a client; those of several choices count once."""
        return len(self._keys_by_client.get(client, ()))

    def is_unfinished(self, key: int) -> bool:
        """Whether a request has not ended."""
        return key in self._placed_by_key

    def is_waiting(self, key: int) -> bool:
        """Whether it has not had its first step."""
        return key in self._waiting_tokens

    def accept(
        self,
        workflow: str,
        body: Any,
        prepared: Prepared,
        client: bytes,
        request_id: str,
        seed: int,
        times: Mapping[str, int] | None = None,
    ) -> list[Register]:
        """Take the requests of a body on; the output process must hear of them before any step that holds them is sent.

        `times` are the fields of Register that say when they came.

        Raises:
            InvalidRequestError: they cannot run.
            OverloadedError: too many tokens wait already. An empty queue takes any prompt that can run.
        """
        parts = self._parts[workflow]
        identity = RequestIdentity(self._next_key, client, request_id, seed)
        requests = parts.accept(body, prepared, self.facts, identity)
        self._check_waiting_tokens(sum(len(request.token_ids) for request in requests))
        self._next_key += len(requests)
        pipeline = self._choose_pipeline(workflow, requests[0])  # choices share the prompt's blocks
        for request in requests:
            pipeline.planners[workflow].add(request)
            self._placed_by_key[request.key] = _Placed(request, workflow, pipeline)
            self._waiting_tokens[request.key] = len(request.token_ids)
            self.num_waiting_tokens += len(request.token_ids)
        self._keys_by_client.setdefault(client, {})[request_id] = [request.key for request in requests]
        registers = [msgspec.structs.replace(parts.register(request, body), **(times or {})) for request in requests]
        for register in registers:
            self._ledger.register(register, body, seed)
        return registers

    def registered(self, key: int) -> bytes:
        """The encoded Register of an unfinished request."""
        return self._ledger.registered(key)

    def admitted(self, step: PlannedStep, sent_ns: int) -> Admitted:
        """What to tell the output process about the requests that start with this step, sent at `sent_ns`."""
        message = Admitted(
            [request.key for request in step.admitted],
            [request.num_cached_tokens or 0 for request in step.admitted],
            sent_ns,
            tuple(request.num_preemptions for request in step.admitted),
        )
        self._ledger.admit(message)
        for request in step.admitted:
            self._stop_waiting(request.key)
        return message

    def rank_of(self, key: int) -> int:
        """The worker that serves an unfinished request."""
        return self._placed_by_key[key].pipeline.rank

    def apply(self, header: StepResult | EmbedResult, payload: NDArray[np.int32]) -> Applied:
        """Take in a result. Of the requests that ended by it the output process sees the same ends by itself."""
        applied = self.pipelines[header.rank].apply(header, payload)
        for request, reason in applied.ended:
            self._ledger.end(request.key, request.token_ids, reason=reason)
            self._forget(request)
        return applied

    def lose_worker(self, rank: int, epoch: int, *, has_died: bool = True) -> list[Finish]:
        """The worker of this epoch is gone: its requests go on, from what they have, on the other workers or, if there
        is none, on its successor. One at whose same place two workers died goes on alone until it is past that; if a
        third one dies there, it ends. Returns the ends. One that has not died was asked to go, with nothing in flight.
        """
        ends: list[Finish] = []
        lost = self.pipelines[rank]
        for workflow, request in lost.lose_worker(epoch, has_died=has_died):
            if request.num_worker_deaths > _MAX_WORKER_DEATHS:
                text = f"the worker died {request.num_worker_deaths} times while this request was running"
                ends.append(self._end_taken(request, text))
            else:
                self._place_again(workflow, request)
        return ends

    def fail_step(self, failed: StepFailed) -> list[Finish]:
        """A worker had not the memory for a step, and has forgotten its slots. The requests of the step end; its others
        go on, from what they have, like those of a worker that is gone. Returns the ends. `restore_worker` follows.
        """
        ends: list[Finish] = []
        for workflow, request in self.pipelines[failed.rank].lose_slots():
            if request.key in failed.keys:
                ends.append(self._end_taken(request, failed.error))
            else:
                self._place_again(workflow, request)
        return ends

    def _end_taken(self, request: AnyRequest, error: str) -> Finish:
        """End a request that no planner has any more."""
        self._forget(request)
        request.is_finished = True
        finish = Finish(request.key, "error", error)
        self._ledger.end(request.key, request.token_ids, finish, "error")
        return finish

    def _place_again(self, workflow: str, request: AnyRequest) -> None:
        pipeline = self._choose_pipeline(workflow, request)
        pipeline.planners[workflow].add(request)
        self._placed_by_key[request.key] = _Placed(request, workflow, pipeline)

    def restore_worker(self, rank: int, epoch: int) -> None:
        """A successor is ready. One of an epoch that is over already is not heard."""
        pipeline = self.pipelines[rank]
        pipeline.is_up |= pipeline.epoch == epoch

    def blame_for_output_death(self, key: int) -> None:
        """The output process died while it was at work on this request (-1: on none). One that is taken for the cause
        ends, and the next output process is not told what is in it.
        """
        if not self._suspects.blame(key):
            return
        finish = Finish(key, "error", "the output process died again and again while it was at work on this request")
        self.end(key, "error", finish.error)
        self._ledger.condemn(finish)

    def resume_output(self, recent: RecentResults) -> Iterator[bytes | tuple[bytes, bytes]]:
        """The output process is gone, and has told its clients nobody knows how much: all that its successor must be
        told, as messages and results. It shows all requests from their beginning; clients drop what they have.
        """
        results, first_known = recent.all(), {}
        if self._ledger.wants_logprobs:
            first_known = first_logprob_positions(results)
        for key, entry in self._ledger.ended():
            yield from _retold(key, entry, entry.token_ids, first_known)
        for key, entry in self._ledger.running():
            yield from _retold(key, entry, self._history(self._placed_by_key[key]), first_known)
        yield from results  # log probabilities, vectors, and tokens that came behind an end by text
        for key, entry in self._ledger.ended():
            # If its tokens end it, they have by now; else what would end it is gone, and nobody may wait for that.
            yield encode(entry.finish or Finish(key, "error", "the results of this request were lost"))

    def deliver(self, keys: Iterable[int]) -> None:
        """The clients of these have been sent their ends."""
        self._ledger.deliver(keys)

    def abort(self, client: bytes, request_id: str) -> list[Finish]:
        """End all choices of a request because its client says so."""
        return self._end_all(self._keys_by_client.get(client, {}).get(request_id, ()))

    def abort_client(self, client: bytes) -> list[Finish]:
        """End all requests of a client that is gone."""
        return self._end_all([key for keys in self._keys_by_client.get(client, {}).values() for key in keys])

    def abort_all(self) -> list[Finish]:
        """End everything that runs."""
        return self._end_all(self._placed_by_key)

    def end(self, key: int, finish_reason: str, error: str | None = None, *, is_told: bool = False) -> Finish | None:
        """End a request and free what it holds; None if it is not running. `is_told`: its client knows."""
        placed = self._placed_by_key.get(key)
        if placed is None:
            return None
        history = self._history(placed).copy()
        placed.pipeline.planners[placed.workflow].finish(placed.request)
        self._forget(placed.request)
        finish = Finish(key, finish_reason, error, is_told)
        is_seen = finish_reason == "stop"  # in the text again
        self._ledger.end(key, history, None if is_seen else finish, finish_reason)
        return finish

    def uses_adapter(self, place: int) -> bool:
        """Whether an unfinished request has the adapter in this place of the workers."""
        return any(_adapter_of(placed.request) == place for placed in self._placed_by_key.values())

    def end_adapter(self, place: int, error: str) -> list[Finish]:
        """End the requests that have the adapter in this place, which is gone."""
        keys = [key for key, placed in self._placed_by_key.items() if _adapter_of(placed.request) == place]
        return [finish for key in keys if (finish := self.end(key, "error", error))]

    def kept_requests(self) -> Iterator[tuple[int, LedgerEntry, NDArray[np.int32]]]:
        """(key, what is known of it, its tokens int32 [n]) of all requests that run and the newest that have ended."""
        for key, entry in self._ledger.ended():
            yield key, entry, entry.token_ids
        for key, entry in self._ledger.running():
            yield key, entry, self._history(self._placed_by_key[key])

    def end_failed(self) -> list[Finish]:
        """End the requests that turned out not to be able to go on (a grammar that gave up)."""
        return [
            finish
            for pipeline in self.pipelines
            for planner in pipeline.planners.values()
            for request, error in planner.take_failed()
            if (finish := self.end(request.key, "error", error))
        ]

    def resync(self, key: int, position: int) -> Replay | Finish:
        """Answer the output process, which misses tokens from `position` on."""
        placed = self._placed_by_key.get(key)
        if placed is not None:
            history = self._history(placed)
        elif (kept := self._ledger.ended_tokens(key)) is not None:
            history = kept
        else:
            return Finish(key, "error", "tokens of this request were lost")
        return Replay(key, position, history[position:].tolist())

    def _history(self, placed: _Placed) -> NDArray[np.int32]:
        """All confirmed tokens of an unfinished request."""
        return self._parts[placed.workflow].history(placed.pipeline.planners[placed.workflow], placed.request)

    def _choose_pipeline(self, workflow: str, request: AnyRequest) -> Pipeline:
        """The worker with the longest cached prefix, then the one with the least to do."""
        pipelines = [pipeline for pipeline in self.pipelines if pipeline.is_up] or self.pipelines
        if len(pipelines) == 1:
            return pipelines[0]
        count_cached = self._parts[workflow].count_cached_tokens
        return max(
            pipelines,
            key=lambda pipeline: (count_cached(pipeline.planners[workflow], request), -pipeline.num_unfinished),
        )

    def _forget(self, request: AnyRequest) -> None:
        del self._placed_by_key[request.key]
        self.num_ended += 1
        self._stop_waiting(request.key)
        keys_by_id = self._keys_by_client[request.client]
        keys_by_id[request.request_id].remove(request.key)
        if not keys_by_id[request.request_id]:
            del keys_by_id[request.request_id]
            if not keys_by_id:
                del self._keys_by_client[request.client]

    def _stop_waiting(self, key: int) -> None:
        self.num_waiting_tokens -= self._waiting_tokens.pop(key, 0)

    def _check_waiting_tokens(self, count: int) -> None:
        limit = self.facts.limits.max_queued_tokens
        if self.num_waiting_tokens and self.num_waiting_tokens + count > limit:
            raise OverloadedError(
                f"{self.num_waiting_tokens} prompt tokens wait for their first step, {count} more would pass the limit "
                f"(max_queued_tokens), which is {limit}; try again later"
            )

    def _end_all(self, keys: Iterable[int]) -> list[Finish]:
        return [finish for key in list(keys) if (finish := self.end(key, "abort"))]


def _adapter_of(request: AnyRequest) -> int:
    return request.adapter if isinstance(request, Request) else NO_ADAPTER


def _retold(
    key: int, entry: LedgerEntry, token_ids: NDArray[np.int32], first_known: Mapping[int, int]
) -> Iterator[bytes]:
    """One request from its beginning. Tokens whose log probabilities are still known come with those, not here."""
    yield entry.registered
    if entry.is_condemned and entry.finish is not None:
        yield encode(entry.finish)  # now: what results may still show of it is nobody's then
        return
    if (admitted := entry.admitted(key)) is not None:
        yield encode(admitted)
    end = first_known.get(key) if entry.wants_logprobs else None
    if (output := token_ids[entry.num_prompt_tokens : end]).size:
        yield encode(Replay(key, entry.num_prompt_tokens, output.tolist()))
