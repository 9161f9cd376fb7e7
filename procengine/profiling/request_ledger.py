"""`RequestLedger`: which requests are unfinished now, from what the processes noted. Pure.

Owns: unfinished requests by key, and what only shows when a request is followed from record to record: prompt tokens
that were taken up, those found in the cache, preemptions. Never does: read a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from procengine.numbering import epoch_of, first_number
from procengine.profiling.records import RecordKind
from procengine.profiling.snapshot import SpanTables

__all__ = ["RequestLedger", "WorkerGauges"]


@dataclass(slots=True)
class _Unfinished:
    rank: int
    num_prompt_tokens: int
    accepted_ns: int
    is_admitted: bool = False
    num_preemptions: int = 0


class WorkerGauges(NamedTuple):
    """One worker's load, as of the last step that was planned for it and what came in since."""

    num_running: int
    num_waiting: int
    num_in_flight: int  # steps
    num_free_blocks: int | None  # of the KV cache, cached ones included; None: all

    @property
    def is_idle(self) -> bool:
        """Whether it has no request."""
        return not self.num_running and not self.num_waiting


class RequestLedger:
    """Feed it all tables, oldest first.

    Processes are read one after the other, so the end of a request may come before its admission, or its beginning.

    Attributes:
        num_accepted, num_prompt_tokens, num_cached_tokens, num_preemptions: totals. Tokens count when their request is
            admitted for the first time.
        is_complete: whether every record since the group began was seen. If not, requests may be running that are not
            known here.
    """

    def __init__(self) -> None:
        self.num_accepted = self.num_prompt_tokens = self.num_cached_tokens = self.num_preemptions = 0
        self.is_complete = True
        self._unfinished: dict[int, _Unfinished] = {}
        self._early_ends: set[int] = set()  # keys whose end was read before their beginning
        self._newest_key = -1
        self._last_steps: dict[int, tuple[int, WorkerGauges]] = {}  # rank -> when it was sent, what it said

    @property
    def num_unfinished(self) -> int:
        """Requests accepted and not ended (choices count one by one)."""
        return len(self._unfinished)

    def add(self, tables: SpanTables) -> None:
        """Take in what is new."""
        self.is_complete &= not tables.num_lost
        self._take_accepted(tables)
        self._take_admitted(tables)
        self._take_done(tables)
        self._take_steps(tables)

    def forget_before(self, accepted_ns: int) -> None:
        """Whatever was accepted before then has ended, whether its end was seen or not."""
        self._unfinished = {key: one for key, one in self._unfinished.items() if one.accepted_ns >= accepted_ns}

    def gauges(self, num_workers: int, num_unfinished: int | None = None) -> list[WorkerGauges]:
        """Each worker's load. `num_unfinished`, of all workers, is what the frontend says itself: it is believed where
        records are missing."""
        return [self._gauges_of(rank, num_unfinished) for rank in range(num_workers)]

    def _gauges_of(self, rank: int, said_unfinished: int | None) -> WorkerGauges:
        own = [request for request in self._unfinished.values() if request.rank == rank]
        sent_ns, last = self._last_steps.get(rank, (0, WorkerGauges(0, 0, 0, None)))
        num_unfinished = len(own)
        if not self.is_complete and said_unfinished is not None:
            num_unfinished = said_unfinished
        if not num_unfinished:
            return WorkerGauges(0, 0, 0, None)
        num_new = sum(request.accepted_ns > sent_ns for request in own)
        num_running = min(last.num_running, num_unfinished)
        return last._replace(
            num_running=num_running, num_waiting=min(last.num_waiting + num_new, num_unfinished - num_running)
        )

    def _take_accepted(self, tables: SpanTables) -> None:
        accepted = tables[RecordKind.REQUEST_ACCEPTED]
        columns = ("key", "rank", "num_prompt_tokens", "accepted_ns")
        for key, *values in zip(*(accepted[name].tolist() for name in columns), strict=True):
            if key == first_number(epoch_of(key)) and key > self._newest_key:
                self._unfinished.clear()  # of a frontend that is gone
            else:
                self.is_complete &= key == self._newest_key + 1
            self._newest_key = key
            self.num_accepted += 1
            if key in self._early_ends:
                self._early_ends.remove(key)
            else:
                self._unfinished[key] = _Unfinished(*values)

    def _take_admitted(self, tables: SpanTables) -> None:
        admitted = tables[RecordKind.REQUEST_ADMITTED]
        columns = ("key", "num_cached_tokens", "num_preemptions")
        for key, num_cached, num_preemptions in zip(*(admitted[name].tolist() for name in columns), strict=True):
            request = self._unfinished.get(key)
            if request is None:
                continue  # its end was read before this
            self.num_preemptions += num_preemptions - request.num_preemptions
            request.num_preemptions = num_preemptions
            if not request.is_admitted:
                self._count_tokens(request.num_prompt_tokens, num_cached)
            request.is_admitted = True

    def _take_done(self, tables: SpanTables) -> None:
        done = tables[RecordKind.REQUEST_DONE]
        columns = ("key", "admitted_ns", "num_prompt_tokens", "num_cached_tokens", "num_preemptions")
        for key, admitted_ns, num_prompt, num_cached, num_preemptions in zip(
            *(done[name].tolist() for name in columns), strict=True
        ):
            request = self._unfinished.pop(key, None)
            if request is None and key <= self._newest_key:
                continue  # it began before we did
            if request is None:
                self._early_ends.add(key)
            if admitted_ns and not (request and request.is_admitted):
                self._count_tokens(num_prompt, num_cached)
            self.num_preemptions += num_preemptions - (request.num_preemptions if request else 0)

    def _count_tokens(self, num_prompt: int, num_cached: int) -> None:
        self.num_prompt_tokens += num_prompt
        self.num_cached_tokens += num_cached

    def _take_steps(self, tables: SpanTables) -> None:
        steps = tables[RecordKind.STEP_SENT]
        for rank in np.unique(steps["rank"]).tolist():
            last = steps.where(np.flatnonzero(steps["rank"] == rank)[-1:])
            names = ("num_running", "num_waiting", "num_in_flight", "num_free_blocks")
            self._last_steps[rank] = (int(last["sent_ns"][0]), WorkerGauges(*(int(last[name][0]) for name in names)))
