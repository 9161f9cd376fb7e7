"""`BenchClient`: sends requests and notes when each message came, as cheaply as a client can.

Owns: the raw record of a run. Never does: compute a figure (`report`), encode a request or read a message while others
are under way if that can be done before or after: it shares the machine's cores with the group it measures.
"""

from __future__ import annotations

import contextlib
import gc
import re
import time
from collections.abc import Iterator, Sequence
from typing import Final, cast

import msgspec
import numpy as np

from procengine.bench.arrivals import Pace
from procengine.bench.record import Record
from procengine.bench.workload import BenchRequest
from procengine.client_bodies import Body, generate_body, messages_body, prompt_body
from procengine.client_core import ClientCore, Pending, dead_group_error
from procengine.client_handshake import answer_losses, connect_link
from procengine.errors import EngineDeadError, InvalidRequestError, ProtocolError
from procengine.groups import GroupInfo, is_gone
from procengine.messages import Stats, Welcome
from procengine.sampling_params import SamplingParams

__all__ = ["BenchClient", "PacedRun", "no_collections"]

_LIVENESS_MS: Final = 500
_NS_PER_MS: Final = 1_000_000
_OUTPUTS_TAG: Final = b"\xa7outputs"  # behind one byte for the length of the array
_FINISH_REASONS: Final = re.compile(rb"\xa4stop|\xa6length|\xa5abort|\xa5error")  # as MessagePack strings


class BenchClient:
    """A client of one group that measures."""

    def __init__(self, group: GroupInfo) -> None:
        self._group = group
        self._core = ClientCore(sees_ends_only=True, resubmits=False)
        self._link, self._welcome = connect_link(group, self._core)
        self._heard_ns = time.perf_counter_ns()

    @property
    def welcome(self) -> Welcome:
        """What the group said about itself."""
        return self._welcome

    def run(self, requests: Sequence[BenchRequest], params: SamplingParams, pace: Pace) -> Record:
        """Send all requests at the given pace and wait for all answers. `params` hold for all, but for `max_tokens`.

        Raises:
            InvalidRequestError: a request cannot be sent at all; names its origin.
            EngineDeadError: the group died.
        """
        prepared = [self._prepare(request, params) for request in requests]
        with no_collections():
            run = PacedRun(prepared, pace)
            while self._core.has_pending:
                frame = run.next_frame()
                if frame is not None:
                    self._link.queue(frame)
                    self._take(self._link.receive(0), run.record)
                else:
                    self._take(self._link.receive(run.poll_ms()), run.record)
                    run.sleep_if_nearly_due()
        run.record.failures.update(_failures([pending for pending, _ in prepared]))
        return run.record

    def stats(self, *, reset: bool = False) -> Stats:
        """The group's counters since the last reset."""
        question, frame = self._core.get_stats(reset=reset)
        self._link.queue(frame)
        while self._core.has_pending:
            self._take(self._link.receive(_LIVENESS_MS), Record({}, {}, [], {}))
        return question.answer(Stats)

    def close(self) -> None:
        """Close the connection."""
        self._link.close(linger=not is_gone(self._group))

    def _prepare(self, request: BenchRequest, params: SamplingParams) -> tuple[Pending, bytes]:
        own = msgspec.structs.replace(params, max_tokens=request.max_tokens)
        try:
            return self._core.submit("generate", generate_body(_body(request), own))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{request.origin}: {error}") from error

    def _take(self, arrived: list[bytes], record: Record) -> None:
        """Note what came. The core only sees messages that may end something; the others are just kept."""
        now_ns = time.perf_counter_ns()
        for frame in arrived:
            record.frames.append((now_ns, frame))
            if _may_end(frame):
                self._core.receive(frame)
        answer_losses(self._link, self._core)
        if arrived:
            self._heard_ns = now_ns
        elif now_ns - self._heard_ns > _LIVENESS_MS * _NS_PER_MS:
            self._heard_ns = now_ns
            if is_gone(self._group):
                raise dead_group_error(self._group.name)


class PacedRun:
    """Which requests of a run may be sent, and how long to wait for the next."""

    def __init__(self, prepared: Sequence[tuple[Pending, bytes]], pace: Pace) -> None:
        self.record = Record({}, {}, [], {})
        self._prepared = prepared
        self._max_concurrency = pace.max_concurrency or len(prepared)
        self._num_sent = 0
        self._num_ended = 0
        for pending, _ in prepared:
            pending.on_end = self._on_end
        self._due_ns: list[int] | None = None
        if pace.arrivals_s is not None:
            self._due_ns = (time.perf_counter_ns() + (pace.arrivals_s * 1e9).astype(np.int64)).tolist()

    def next_frame(self) -> bytes | None:
        """The next request, if it may be sent now; its times are noted. None: wait."""
        if self._is_held_back():
            return None
        now_ns = time.perf_counter_ns()
        intended_ns = now_ns if self._due_ns is None else self._due_ns[self._num_sent]
        if intended_ns > now_ns:
            return None
        pending, frame = self._prepared[self._num_sent]
        self._num_sent += 1
        self.record.intended_ns[pending.request_id] = intended_ns
        self.record.submitted_ns[pending.request_id] = now_ns
        return frame

    def poll_ms(self) -> int:
        """How long to wait for messages, in the whole milliseconds that a poll takes: not beyond the next arrival."""
        return min(self._until_due_ns() // _NS_PER_MS, _LIVENESS_MS)

    def sleep_if_nearly_due(self) -> None:
        """Wait for the rest of the last millisecond before an arrival. A message that comes meanwhile is noted late."""
        rest_ns = self._until_due_ns()
        if 0 < rest_ns < _NS_PER_MS:
            time.sleep(rest_ns / 1e9)

    def _until_due_ns(self) -> int:
        if self._due_ns is None or self._is_held_back():
            return _LIVENESS_MS * _NS_PER_MS
        return max(self._due_ns[self._num_sent] - time.perf_counter_ns(), 0)

    def _is_held_back(self) -> bool:
        """Whether no request may be sent before another ends, or none is left."""
        num_sent = self._num_sent
        return num_sent == len(self._prepared) or num_sent - self._num_ended >= self._max_concurrency

    def _on_end(self, _: Pending) -> None:
        self._num_ended += 1


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """A pass over all the kept messages would take milliseconds, and count as the group's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _may_end(frame: bytes) -> bool:
    """False if the message surely holds no terminal delta: then it has no finish reason anywhere."""
    return not frame.startswith(_OUTPUTS_TAG, 1) or _FINISH_REASONS.search(frame) is not None


def _body(request: BenchRequest) -> Body:
    prompt = request.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return messages_body(prompt)
    return prompt_body(cast("str | list[int]", prompt))


def _failures(pendings: Sequence[Pending]) -> dict[str, str]:
    """Why requests failed. An error that ends the connection, or the group, ends the run too."""
    for pending in pendings:
        if isinstance(pending.error, EngineDeadError | ProtocolError):
            pending.raise_error()
    return {pending.request_id: str(pending.error) for pending in pendings if pending.error is not None}
