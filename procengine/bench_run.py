"""`BenchRun`: sends requests and notes when each message came, as cheaply as a client can.

Owns: the raw record of a run. Never does: compute a figure (`bench_report`), or read a message that can wait: it shares
the machine's cores with the group it measures, so messages are kept as bytes with one time stamp and read afterwards.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from procengine.client import connect_link
from procengine.client_bodies import generate_body, prompt_body
from procengine.client_core import ClientCore, Pending, dead_group_error
from procengine.errors import ProcengineError
from procengine.groups import GroupInfo, is_gone
from procengine.messages import Stats, Welcome
from procengine.sampling_params import SamplingParams

__all__ = ["BenchClient", "Record"]

_LIVENESS_MS: Final = 500
_OUTPUTS_TAG: Final = b"\xa7outputs"  # behind one byte for the length of the array
_FINISH_REASONS: Final = re.compile(rb"\xa4stop|\xa6length|\xa5abort|\xa5error")  # as MessagePack strings


class Record(NamedTuple):
    """One run: when each request was sent, and each message with its time of arrival (ns, one clock)."""

    submitted_ns: dict[str, int]
    frames: list[tuple[int, bytes]]


class BenchClient:
    """A client of one group that measures."""

    def __init__(self, group: GroupInfo) -> None:
        self._group = group
        self._core = ClientCore()
        self._link, self._welcome = connect_link(group, self._core)

    @property
    def welcome(self) -> Welcome:
        """What the group said about itself."""
        return self._welcome

    def run_all(self, prompts: Sequence[str | list[int]], params: SamplingParams) -> Record:
        """Send all prompts at once and wait for all answers."""
        record = Record({}, [])
        self._wait([self._submit(prompt, params, record) for prompt in prompts], record)
        return record

    def run_one_by_one(self, prompts: Sequence[str | list[int]], params: SamplingParams) -> Record:
        """Send each prompt when the answer to the one before is complete."""
        record = Record({}, [])
        for prompt in prompts:
            self._wait([self._submit(prompt, params, record)], record)
        return record

    def stats(self, *, reset: bool = False) -> Stats:
        """The group's counters since the last reset."""
        question, frame = self._core.get_stats(reset=reset)
        self._link.queue(frame)
        self._wait([question], Record({}, []))
        return question.answer(Stats)

    def close(self) -> None:
        """Close the connection."""
        self._link.close(linger=not is_gone(self._group))

    def _submit(self, prompt: str | list[int], params: SamplingParams, record: Record) -> Pending:
        pending, frame = self._core.submit("generate", generate_body(prompt_body(prompt), params))
        record.submitted_ns[pending.request_id] = time.perf_counter_ns()
        self._link.queue(frame)
        self._link.flush()
        return pending

    def _wait(self, pendings: Sequence[Pending], record: Record) -> None:
        """Until all have ended. The core only sees messages that may end something; the others are just kept."""
        frames, receive = record.frames, self._core.receive
        while self._core.has_pending:
            arrived = self._link.receive(_LIVENESS_MS)
            now_ns = time.perf_counter_ns()
            for frame in arrived:
                frames.append((now_ns, frame))
                if _may_end(frame):
                    receive(frame)
            if not arrived and is_gone(self._group):
                raise dead_group_error(self._group.name)
        for pending in pendings:
            _check(pending)


def _may_end(frame: bytes) -> bool:
    """False if the message surely holds no terminal delta: then it has no finish reason anywhere."""
    return not frame.startswith(_OUTPUTS_TAG, 1) or _FINISH_REASONS.search(frame) is not None


def _check(pending: Pending) -> None:
    if pending.error is not None:
        raise ProcengineError(f"request {pending.request_id} of the benchmark failed: {pending.error}")
